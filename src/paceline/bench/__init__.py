"""Benchmarks against PyTorch's DDP, gloo, Open MPI, pandas and Opacus: one module for each.

Every module of this folder is a benchmark (`parts/benchmark.py` says what it defines), so a new one
is one file. `measure/` holds what the benchmarks run, `peers/` what they are compared with.
"""
