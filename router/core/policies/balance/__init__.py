"""Balance by what decode steps read, for ranks that step together: BR-0, BR-H, and DLPM with the same score."""
