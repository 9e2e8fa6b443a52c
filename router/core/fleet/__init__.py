"""What the core knows of each worker: what is in flight, how fast it is, whether it is healthy."""
