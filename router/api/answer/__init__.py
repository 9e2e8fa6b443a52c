"""Readers of answers, streamed or whole, on their way to the client."""
