"""A finished run: its history, its workers, its model, and what its weights score on other data."""
