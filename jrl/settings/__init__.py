"""Settings of a run: sections of its config, their reading and writing, the plan that follows, what cannot run."""
