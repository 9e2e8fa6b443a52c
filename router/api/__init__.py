"""The wire formats of engines and clients, one family of endpoints each. Pure: no I/O, only bytes in and out."""
