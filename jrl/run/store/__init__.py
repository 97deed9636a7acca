"""Checkpoints of a run: their arrays and descriptions, when they are written, how a run resumes."""
