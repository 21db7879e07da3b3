"""The board of a run: a key-value server of our own, which only ranks with the run's secret reach.

Ranks find each other there, tell each other what they wait for, and learn which rank is gone.
"""
