"""A driver's session with Ray."""
