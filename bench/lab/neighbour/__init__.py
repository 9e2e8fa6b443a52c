"""Noisy neighbours over HTTP, before any OpenAI-compatible server."""
