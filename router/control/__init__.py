"""The control plane: the HTTP API for operators, built on FastAPI."""
