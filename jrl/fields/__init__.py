"""Fields of a config: ranges, YAML as plain data, sections built from it, and the sections `env` and `network`."""
