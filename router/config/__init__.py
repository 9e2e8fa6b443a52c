"""Settings: what there is, where values come from, and the commented YAML file."""
