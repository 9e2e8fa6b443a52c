"""The live page at /ui: its files, and the stream of what it shows."""
