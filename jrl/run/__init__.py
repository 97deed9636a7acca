"""Runs: how they are built, their loop, result rows, and checkpoints."""
