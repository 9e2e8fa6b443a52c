"""Responses that engines store or compute in the background."""
