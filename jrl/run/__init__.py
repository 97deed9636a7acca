"""A run under way: its programs, keys and loop."""
