"""What the router writes to disk: its state and the decision log."""
