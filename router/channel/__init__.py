"""What passes between the fronts and the scheduler."""
