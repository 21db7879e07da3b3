"""Gaussian noise from a cryptographic random stream: AES in counter mode.

    bits <- AES-128-CTR(key) ;   out <- factor * out + scale * normal(bits)

Each worker draws a new key from the operating system in each run and stores it nowhere. A key made
from a seed gives the same noise again, for tests and comparisons. Such a run is not private: with
the seed, the noise can be subtracted.
"""

from __future__ import annotations

import hashlib
import math
import secrets

import torch
from torch import Tensor

from paceline.errors import BadRequest
from paceline.privacy.native import loops_for

BLOCK = 1 << 16  # numbers drawn at a time; more would push the model out of the CPU's cache
INSTALL = "pip install 'paceline[privacy]'"


def draw_key(seed: int | None, *purpose: object) -> bytes:
    """Return 32 bytes: secret, or (not private) made from a seed."""
    if seed is None:
        return secrets.token_bytes(32)
    text = "/".join(str(p) for p in (seed, "privacy", *purpose))
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


class Noise:
    """Adds normal noise to tensors. On other devices than the CPU it seeds PyTorch's generator."""

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError:
            raise BadRequest(
                f"privacy needs the package cryptography, for its noise: {INSTALL}"
            ) from None
        self._stream = Cipher(algorithms.AES(key[:16]), modes.CTR(bytes(16))).encryptor()
        self._raw = bytearray(4 * BLOCK)
        self._memory = memoryview(self._raw)
        self._bits = torch.frombuffer(self._raw, dtype=torch.int32)
        self._address = self._bits.data_ptr()
        self._elsewhere: dict[torch.device, torch.Generator] = {}

    def add(self, out: Tensor, factor: float, scale: float) -> None:
        """Set out <- factor * out + scale * normal numbers, in place; `out` is flat."""
        if out.device.type != "cpu":
            normal = torch.empty_like(out).normal_(generator=self._generator(out.device))
            out.mul_(factor).add_(normal, alpha=scale)
            return
        quick = loops_for(out, out)
        for start in range(0, out.numel(), BLOCK):
            count = min(BLOCK, out.numel() - start)
            self._draw(count)
            if quick is not None:
                quick.add_normal(self._address, out.data_ptr() + 4 * start, count, factor, scale)
            else:
                bits = self._bits[: count + count % 2]
                out[start : start + count].mul_(factor).add_(
                    normal_from(bits, out.dtype)[:count], alpha=scale
                )

    def number(self) -> float:
        """Draw one normal number."""
        self._draw(2)
        return float(normal_from(self._bits[:2], torch.float64)[0])

    def _draw(self, numbers: int) -> None:
        """Draw fresh bits for so many numbers into the buffer.

        The cipher's output is added to the old bits, and the sum is as random as the output.
        """
        part = self._memory[: 4 * (numbers + numbers % 2)]
        self._stream.update_into(part, part)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._elsewhere:
            self._draw(2)
            seed = int.from_bytes(self._raw[:8], "little") >> 1
            self._elsewhere[device] = torch.Generator(device).manual_seed(seed)
        return self._elsewhere[device]


def normal_from(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one normal number for each 32 bits, by Box and Muller's method.

    gauss.c does the same in float32.
    """
    pairs = bits.numel() // 2
    first, second = bits[:pairs], bits[pairs:]
    uniform = ((first.to(torch.int64) & 0xFFFFFFFF) >> 1).to(dtype).add_(0.5).mul_(2.0**-31)
    radius = uniform.log_().mul_(-2.0).clamp_(min=0.0).sqrt_()
    angle = second.to(dtype).mul_(math.pi * 2.0**-31)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])
