"""Schedules, one algorithm per file."""
