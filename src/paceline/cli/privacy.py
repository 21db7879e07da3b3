"""`paceline privacy`"""

from __future__ import annotations

import json
from typing import Any

import click

from paceline.cli.groups import Choice


@click.command()
@click.option(
    "--samples", type=click.IntRange(1), required=True, help="samples in the training set"
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    required=True,
    help="expected batch size over all workers",
)
@click.option("--epochs", type=click.IntRange(1), default=None, help="passes over the data")
@click.option("--steps", type=click.IntRange(1), default=None, help="steps, instead of --epochs")
@click.option("--noise", type=float, default=None, help="compute epsilon for this noise multiplier")
@click.option(
    "--epsilon", type=float, default=None, help="compute the noise multiplier for this epsilon"
)
@click.option(
    "--delta", type=float, default=1e-5, show_default=True, help="delta of (epsilon, delta)"
)
@click.option(
    "--sampling",
    type=Choice("sampling", ["poisson", "shuffle"]),
    default="poisson",
    show_default=True,
    help="how batches are drawn",
)
@click.option("--json", "as_json", is_flag=True, help="print the numbers to standard output")
@click.option("--debug", is_flag=True, help="show tracebacks")
def privacy(
    samples: int,
    batch_size: int,
    epochs: int | None,
    steps: int | None,
    noise: float | None,
    epsilon: float | None,
    delta: float,
    sampling: str,
    as_json: bool,
    debug: bool,
) -> None:
    """Compute epsilon from noise, or noise from epsilon, before you train.

    \b
    Examples:
      paceline privacy --samples 60000 --batch-size 256 --epochs 60 --noise 1.1
      paceline privacy --samples 60000 --batch-size 256 --epochs 60 --epsilon 3 --delta 1e-6
    """
    from rich.console import Console

    from paceline.errors import BadRequest
    from paceline.privacy.accounting import Spent, epsilon_of, noise_for
    from paceline.privacy.sampling import steps_per_epoch
    from paceline.privacy.settings import Settings
    from paceline.terminal.pairs import pairs_table

    if (epochs is None) == (steps is None):
        raise BadRequest("give --epochs or --steps, one of the two")
    if (noise is None) == (epsilon is None):
        raise BadRequest(
            "give --noise (to compute epsilon) or --epsilon (to compute the noise), one of the two"
        )
    if batch_size > samples:
        raise BadRequest(f"--batch-size {batch_size} is more than --samples {samples}")
    given = {
        k: v for k, v in (("noise", noise), ("epsilon", epsilon), ("delta", delta)) if v is not None
    }
    Settings.read(given)
    epoch = (
        steps_per_epoch(samples, batch_size) if sampling == "poisson" else -(-samples // batch_size)
    )
    made = steps if steps is not None else (epochs or 0) * epoch
    rate, times = (
        (batch_size / samples, made) if sampling == "poisson" else (1.0, -(-made // epoch))
    )
    if noise is None:
        assert epsilon is not None
        noise = noise_for(epsilon, delta, rate, times)
    spent = [Spent(noise, rate, times)]
    found: dict[str, Any] = {
        "epsilon": epsilon_of(spent, delta),
        "epsilon_rdp": epsilon_of(spent, delta, "rdp"),
        "delta": delta,
        "noise": noise,
        "rate": rate,
        "steps": made,
        "sampling": sampling,
    }
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    rows = (
        ("epsilon (privacy loss distribution)", f"{found['epsilon']:.4g}"),
        ("epsilon (Rényi)", f"{found['epsilon_rdp']:.4g}"),
        ("delta", f"{delta:g}"),
        ("noise, in units of the clip norm", f"{noise:g}"),
        ("a sample is in a step with probability", f"{rate:.4g}"),
        ("steps", f"{made:,}"),
    )
    console = Console()
    console.print(pairs_table(rows))
    if sampling == "shuffle":
        console.print(
            "Batches are not secret with sampling=shuffle, so epsilon has no gain from sampling.",
            highlight=False,
        )
