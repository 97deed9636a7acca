"""`NetworkConfig` under the networks' name; `jrl.fields.hyper` defines it, so that it can be imported without jax."""

from jrl.fields.hyper import NetworkConfig

__all__ = ["NetworkConfig"]
