"""What the two engines say on the wire: chunks, answers, errors and metrics."""
