"""Records of a run, and the figures made of them."""
