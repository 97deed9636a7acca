"""The loop of a run: programs that collect and learn, devices, populations, random keys."""
