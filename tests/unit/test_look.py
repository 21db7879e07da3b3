"""The shared look: its colours, and whether readers can tell the workers' colours apart."""

import itertools
import re

import numpy as np

from paceline.look import LIGHT, WORKERS, css, worker

# How the two kinds of red-green blindness and blue blindness see linear RGB (Machado et al., 2009).
SIGHT = {
    "trichromat": np.eye(3),
    "protanope": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranope": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanope": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(colour: str) -> np.ndarray:
    """A hexadecimal colour as linear RGB."""
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Linear RGB in Oklab, where distances are roughly as they are perceived."""
    to_lms = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    to_lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return to_lab @ np.cbrt(to_lms @ np.clip(rgb, 0, 1))


def nearest(colours: tuple[str, ...]) -> float:
    """The least distance of two of these colours, over all kinds of colour vision."""
    return min(
        float(np.linalg.norm(oklab(matrix @ linear(a)) - oklab(matrix @ linear(b))))
        for matrix in map(np.array, SIGHT.values())
        for a, b in itertools.combinations(colours, 2)
    )


def test_workers_colours_can_be_told_apart_with_any_colour_vision() -> None:
    assert len(set(WORKERS)) == 16
    assert nearest(WORKERS[:4]) > 0.14
    assert nearest(WORKERS[:8]) > 0.11
    assert nearest(WORKERS) > 0.08
    assert nearest(("#228833", "#998833")) < 0.08  # the measure notices red-green pairs
    assert worker(17) == WORKERS[1]


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, as WCAG defines it."""
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_text_has_contrast_in_light_and_dark() -> None:
    dark = dict(
        re.findall(r"--([\w-]+): (#[0-9a-f]{6})", css().partition('[data-theme="dark"] {')[2])
    )
    for theme in (LIGHT, {**LIGHT, **dark}):
        for name in ("ink", "soft", "accent", "good", "bad", "warn"):
            assert contrast(theme[name], theme["paper"]) >= 4.5, name


def test_dark_is_the_same_by_choice_and_by_system_and_print_is_light() -> None:
    blocks = re.findall(r"--paper: #\w+; --panel.*?--warn: #\w+;", css(), re.DOTALL)
    system, chosen, printed = (re.sub(r"\s+", " ", block) for block in blocks)
    assert system == chosen
    shown = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", printed))
    assert shown == {name: LIGHT[name] for name in shown}
