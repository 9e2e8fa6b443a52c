"""What is recorded of each call in its front, for the access log, traces and metrics."""
