"""Trackers that are reached through their own Python package, each run in a process that may be thrown away."""
