"""Predictions of token counts and output lengths."""
