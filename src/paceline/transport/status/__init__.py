"""What each rank of a run does now, in files that others read at any time without its help."""
