"""The wire format of each family of endpoints, one module each."""
