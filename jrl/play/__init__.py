"""Trained policies in environments: evaluation, recording, video, `jrl.load`."""
