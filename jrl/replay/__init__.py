"""Experience replay on the device: `ring` samples uniformly, `prioritized` by priority."""
