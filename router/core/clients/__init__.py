"""What the core knows of each client: its service, its share, its queue."""
