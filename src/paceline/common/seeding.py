"""Independent random streams from one seed: each is a pure function of (seed, purpose)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive(seed: int, *purpose: object) -> int:
    """Return a 63-bit seed: the same on all machines, unrelated for any two purposes."""
    text = "/".join(str(p) for p in (seed, *purpose)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def generator(seed: int, *purpose: object) -> torch.Generator:
    """Return a generator for one purpose."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


def seed_everything(seed: int) -> None:
    """Seed the default generators of PyTorch, Python and NumPy, which a user's code may use."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_states() -> dict[str, Any]:
    """Return the states of the default generators.

    That of the current CUDA device is among them where this process uses CUDA.
    """
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def saved_random_states() -> dict[str, Any]:
    """Return the states of the default generators, in types that a checkpoint can hold."""
    states = random_states()
    name, keys, *rest = states["numpy"]
    version, internal, gauss = states["python"]
    # as tensors: a checkpoint writes and reads 600 single numbers slowly
    return {
        **states,
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
        "python": [version, torch.tensor(internal), gauss],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Set the default generators to what one of the two functions above returned."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_initialized():  # not where the run goes on on the CPU
        torch.cuda.set_rng_state(states["cuda"])
    version, internal, gauss = states["python"]
    if isinstance(internal, torch.Tensor):
        internal = internal.tolist()
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))


class OwnRandom:
    """Gives code that uses the default generators random states of its own while it runs."""

    def __init__(self, seed: int) -> None:
        with _restored():
            seed_everything(seed)
            self._states = random_states()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with _restored():
            set_random_states(self._states)
            try:
                yield
            finally:
                self._states = random_states()


@contextmanager
def _restored() -> Iterator[None]:
    before = random_states()
    try:
        yield
    finally:
        set_random_states(before)
