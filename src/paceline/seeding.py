"""Independent random streams from one seed: a pure function of (seed, what it is for)."""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *purpose: object) -> int:
    """A 63-bit seed for one purpose; the same on every machine, unrelated for any two purposes."""
    text = "/".join(str(p) for p in (seed, *purpose)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def generator(seed: int, *purpose: object) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, *purpose))
