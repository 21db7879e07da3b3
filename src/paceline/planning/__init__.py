"""Predicts what a strategy would cost with workers and networks that were not measured."""
