"""The scheduling core: pure, synchronous, deterministic. No I/O, no clock, no global random, no logging."""
