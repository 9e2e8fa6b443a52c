"""The router's core over emulated engines in virtual time."""
