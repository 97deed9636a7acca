"""Programs that collect and learn, the training loop, devices, populations and random keys."""
