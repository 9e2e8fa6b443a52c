"""Helpers for any long-running Python process: timers, files, periodic tasks, garbage collection."""
