"""Process and machine of a run: files, streams, signals, memory, what is set before jax starts."""
