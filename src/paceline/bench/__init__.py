"""Us and the peers, interleaved, as ratios."""
