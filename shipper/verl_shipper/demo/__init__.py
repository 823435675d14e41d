"""A small real training to look at: a NumPy policy learns to add, and everything it logs goes through the client."""
