"""The believed content of each worker's prefix cache."""
