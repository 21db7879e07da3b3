"""Peers: scripts that use nothing of Paceline."""
