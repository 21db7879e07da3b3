"""What every other room uses: seeds, units, intervals, files, cache folders. Imports nothing but
errors.
"""
