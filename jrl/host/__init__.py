"""Process and machine of a run: files, streams, signals, memory, settings before jax starts."""
