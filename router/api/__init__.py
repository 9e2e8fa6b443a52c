"""The wire format of engines and clients, per family of endpoints. Pure: bytes in, facts and bytes out."""
