"""Measurements of single operations."""
