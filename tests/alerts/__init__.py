"""Every alert made to fire by a fault in a real stack, watched by a real Prometheus (make test-alerts)."""
