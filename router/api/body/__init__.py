"""Reading and editing the bodies of calls."""
