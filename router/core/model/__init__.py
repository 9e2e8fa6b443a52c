"""The messages of the core: requests, events in, commands out, prompt keys and the pieces of a saved state."""
