"""Prefix caches as the engines' own KV events report them, block by block."""
