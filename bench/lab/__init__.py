"""Experiments and measurements of this project. They need a checkout and are not part of the wheel."""
