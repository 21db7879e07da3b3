"""What is minimised (losses) and what is reported (metrics)."""
