"""`jrl.migrate` is `jrl.rllib.migration`: RLlib's configurations of any generation as jrl's."""

from jrl.rllib.migration import Migration, looks_like_rllib, main, migrate, translated
from jrl.rllib.table import KEYS

__all__ = ["KEYS", "Migration", "looks_like_rllib", "main", "migrate", "translated"]
