"""What all other packages use: seeds, units, intervals, files, locks, cache folders.

It imports only `paceline.errors`.
"""
