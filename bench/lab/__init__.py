"""Experiments and measurements of this project. Needs a checkout: it is no part of the wheel."""
