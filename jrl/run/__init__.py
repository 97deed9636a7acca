"""A run under way: how it is built, its programs and loop, its policies, reports, checkpoints and resumes."""
