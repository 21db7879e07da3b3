"""Every optimizer against its formula (docs/optimizers.md), every schedule against its
definition.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import BadRequest
from paceline.registry import optimizers, schedules

LR, DECAY, STEPS = 0.1, 0.05, 6


def gradients() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(5, generator=random, dtype=torch.float64) for _ in range(STEPS)]


def by_formula(name: str, w: Tensor) -> Tensor:
    """The table of docs/optimizers.md, written out."""
    v = s = m = torch.zeros_like(w)
    for t, gradient in enumerate(gradients(), start=1):
        g = gradient if name == "adamw" else gradient + DECAY * w
        if name == "sgd":
            w = w - LR * g
        elif name == "momentum":
            v = 0.9 * v + g
            w = w - LR * v
        elif name == "adagrad":
            s = s + g**2
            w = w - LR * g / (s.sqrt() + 1e-10)
        elif name == "rmsprop":
            s = 0.99 * s + 0.01 * g**2
            w = w - LR * g / (s.sqrt() + 1e-8)
        else:
            m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g**2
            if name == "adamw":
                w = w - LR * DECAY * w
            w = w - LR * (m / (1 - 0.9**t)) / ((s / (1 - 0.999**t)).sqrt() + 1e-8)
    return w


@pytest.mark.parametrize("name", optimizers.names())
def test_update_rule(name: str) -> None:
    start = torch.linspace(-1, 1, 5, dtype=torch.float64)
    parameter = nn.Parameter(start.clone())
    optimizer = optimizers.build(name, params=[parameter], lr=LR, momentum=None, weight_decay=DECAY)
    for gradient in gradients():
        parameter.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), by_formula(name, start), rtol=1e-12, atol=1e-12)


def test_momentum_where_it_makes_no_sense() -> None:
    for name in ("adam", "adamw", "adagrad"):
        with pytest.raises(BadRequest, match="takes no momentum"):
            optimizers.build(
                name, params=[nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9, weight_decay=0.0
            )


def test_schedules() -> None:
    assert [schedules.build("constant")(s, 10) for s in (0, 9)] == [1.0, 1.0]
    assert [schedules.build("step:every=3,gamma=0.5")(s, None) for s in (0, 2, 3, 6)] == [
        1.0,
        1.0,
        0.5,
        0.25,
    ]
    assert [schedules.build("warmup:steps=4")(s, None) for s in (0, 1, 3, 9)] == [
        0.25,
        0.5,
        1.0,
        1.0,
    ]
    cosine = schedules.build("cosine:final=0.1,warmup=2")
    assert [cosine(0, 12), cosine(1, 12), cosine(2, 12)] == [0.5, 1.0, 1.0]
    assert math.isclose(cosine(7, 12), 0.55)
    assert math.isclose(cosine(12, 12), 0.1)
    with pytest.raises(BadRequest, match="how long"):
        cosine(5, None)
    for bad in ("step:every=0", "warmup:steps=0"):
        with pytest.raises(BadRequest, match="1 or more"):
            schedules.build(bad)
