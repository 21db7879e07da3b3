"""How all ranks combine a buffer. One file per algorithm."""
