"""Asks workers how they are, what they serve and what they do, at intervals."""
