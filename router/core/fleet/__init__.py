"""Workers as the core knows them: what is in flight, how fast each worker is, and whether it is healthy."""
