"""What the benchmarks run. These modules import torch; those above them, which `--help` reads, do
not.
"""
