"""Follows the workers' KV events, and finds the token ids by which calls are matched to them."""
