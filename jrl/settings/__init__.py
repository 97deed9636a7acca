"""What a run is: the sections of its config, their bounds and plan, and how YAML becomes one."""
