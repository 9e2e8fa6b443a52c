"""Parsing and editing of request bodies."""
