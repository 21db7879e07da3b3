"""Faults injected into real runs: 1,000 seeded trials, and what each must end as."""
