"""What any long-running Python process needs: timers, files, periodic tasks, garbage collection."""
