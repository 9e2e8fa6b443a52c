"""The HTTP server around an emulated engine."""
