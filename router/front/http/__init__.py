"""HTTP connections of clients: limits, deadlines, reading and writing."""
