"""Gymnasium environments without jax: what worker processes import. Faults, action masks, shared memory, the worker."""
