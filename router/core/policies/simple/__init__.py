"""The usual load balancers, and first come, first served."""
