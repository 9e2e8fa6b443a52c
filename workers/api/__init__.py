"""The HTTP APIs that the emulated engines serve, apart from what differs by dialect."""
