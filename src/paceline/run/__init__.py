"""What one rank does: the training loop of a worker, a server, a loop of one's own."""
