"""Fields of a config and what they may hold: bounds, YAML of any kind, dataclasses from it, the network section."""
