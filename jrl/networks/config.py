"""`NetworkConfig` under the name that the networks use; it lives where it can be imported without jax."""

from jrl.fields.hyper import NetworkConfig

__all__ = ["NetworkConfig"]
