"""Decisions as pure functions and tables: no clock, no randomness, no I/O. Time and jitter come as arguments."""
