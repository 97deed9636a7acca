"""A run under way: how it is built, its loop, result rows, and checkpoints."""
