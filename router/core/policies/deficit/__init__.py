"""Deficit counters: refill, eligibility, rounds."""
