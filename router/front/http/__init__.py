"""Client connections over HTTP: limits, deadlines, reading and writing."""
