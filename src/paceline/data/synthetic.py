"""Synthetic data that can be learned: a prototype for each class, and noise around it."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch

from paceline.data.base import Data, TensorSamples
from paceline.errors import BadRequest
from paceline.registry import sources


@sources.register("synthetic")
def synthetic(
    shape: Annotated[tuple[int, ...], "of one sample"] = (3, 32, 32),
    classes: Annotated[int, "how many"] = 10,
    samples: Annotated[int, "to train on; a fifth as many to test on"] = 10_000,
    noise: Annotated[float, "spread around a class's prototype; more is harder"] = 2.0,
    seed: Annotated[int, "of the data itself"] = 0,
) -> Data:
    """Prototypes and noise, of any shape, size and number of classes."""
    if not shape or min(shape) < 1 or classes < 2 or samples < 1:
        raise BadRequest(
            f"synthetic: shape={shape}, classes={classes}, samples={samples}: sizes of 1 or more, 2"
            " classes or more"
        )
    if not noise >= 0:
        raise BadRequest(f"synthetic: noise={noise}: 0 or more")
    random = np.random.default_rng(seed)
    prototypes = random.standard_normal((classes, *shape), dtype=np.float32)

    def draw(count: int) -> TensorSamples:
        labels = random.integers(0, classes, count)
        inputs = random.standard_normal((count, *shape), dtype=np.float32)
        inputs *= np.float32(noise)
        inputs += prototypes[labels]
        return TensorSamples(torch.from_numpy(inputs), torch.from_numpy(labels.astype("int64")))

    return Data("synthetic", draw(samples), draw(max(1, samples // 5)), tuple(shape), classes)
