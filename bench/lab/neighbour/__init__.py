"""Noisy neighbours over HTTP, in front of any OpenAI-compatible server."""
