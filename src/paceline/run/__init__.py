"""What one rank does: the training loop of a worker, a server, your own loop."""
