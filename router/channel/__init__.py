"""The channel between fronts and scheduler: events go to the scheduler, commands come back."""
