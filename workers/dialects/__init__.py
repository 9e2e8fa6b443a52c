"""The wire formats of the two engines: chunks, answers, errors and metrics."""
