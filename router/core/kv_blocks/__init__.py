"""Prefix caches by the engines' own KV events, block by block."""
