"""The log on standard error: its formats, its access log, and how it counts what repeats."""
