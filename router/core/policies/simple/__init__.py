"""The usual balancers and first come, first served."""
