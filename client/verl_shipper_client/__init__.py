"""Public API."""
