"""Data-parallel ranks behind one URL: what the engine says of them, how calls name them, and their common health."""
