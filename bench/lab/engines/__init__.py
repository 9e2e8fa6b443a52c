"""Policies compared live before engines that run already."""
