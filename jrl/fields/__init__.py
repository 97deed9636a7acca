"""What a field of a config may hold: bounds, YAML of any kind, dataclasses from it, the network section."""
