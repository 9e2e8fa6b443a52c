"""A request whose prompt one engine computes and whose answer another one: the call to the first, and what it keeps."""
