"""What one or two workers cost, measured (a profile), and what any number would, predicted."""
