"""The parts of a loop of the user's own (run/own_loop.py puts them together)."""
