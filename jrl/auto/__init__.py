"""`jrl train ENV`: inspect an environment, and choose a config by the rules of rules.yaml."""
