"""The picture of the dashboard."""
