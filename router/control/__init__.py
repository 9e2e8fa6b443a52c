"""The control plane: the HTTP API of operators, on FastAPI."""
