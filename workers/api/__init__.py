"""The HTTP APIs that the emulated engines serve, read and answered apart from their dialects."""
