"""What each worker's prefix cache holds."""
