"""This process and its machine: files, streams, signals, memory, what is set before jax starts."""
