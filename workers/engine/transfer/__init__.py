"""Prefill and decode on different engines: what an engine keeps for the other, and until when. Pure."""
