"""The data path: from the bytes of a client to the bytes of a worker and back."""
