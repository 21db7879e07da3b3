"""Models that are split: which options go with a form, and which are refused, with the reason."""

from __future__ import annotations

from torch import nn

from paceline.data.base import Stream
from paceline.errors import BadRequest
from paceline.parallel.dropout import other_randomness
from paceline.request.config import Config
from paceline.request.job import Job
from paceline.strategies.base import Strategy

# Options that a split model does not know, and why.
REFUSED = {
    "privacy": "it clips the gradient of each sample, which no worker has whole",
    "balance": "it gives workers batches by speed, and the workers of a copy share one batch",
    "step": "it calls the whole model, and no worker has it",
    "compile": "torch.compile would have to follow messages between workers",
    "ema": "its average is kept for whole models only",
    "until_converged": "no worker sees all weights",
    "profile": "its tables are of whole models",
}


def check_form(job: Job, strategy: Strategy, model: nn.Module) -> None:
    """Refuse what cannot be combined with a model that is split, and a model that cannot be."""
    config, arrangement = job.config, job.arrangement
    assert arrangement.form is not None
    name = arrangement.form.name
    for option, why in REFUSED.items():
        if getattr(config, option) != Config.options()[option].default:
            raise BadRequest(f"{option} cannot be used with parallel={name}: {why}")
    if strategy.name == "serial" and arrangement.parts > 1:
        raise BadRequest(
            f"strategy serial is one worker, and parallel={name} has {arrangement.parts}: leave it"
            " out; with one copy of the model no gradients are exchanged"
        )
    traits = strategy.traits
    if traits.serves is not None or not traits.in_step or not traits.flat or traits.survives:
        fitting = "allreduce, ring-reduce, stepwise, local-sgd or diloco"
        raise BadRequest(
            f"strategy {strategy.name} cannot be used with parallel={name}: the copies of a model"
            f" that is split keep in step; use {fitting}"
        )
    if config.precision == "fp16":
        raise BadRequest(
            f"precision=fp16 cannot be used with parallel={name}: its workers would have to agree"
            " on the loss scale in every step; use bf16"
        )
    if config.memory_format == "channels_last":
        raise BadRequest(f"memory_format=channels_last cannot be used with parallel={name} yet")
    if isinstance(job.data.train, Stream):
        raise BadRequest(
            f"parallel={name} needs samples in a known order: a stream cannot be used with it"
        )
    if random := other_randomness(model):
        raise BadRequest(
            f"parallel={name}: {random[0]} draws random numbers in the order of computing, which a"
            " split model does not have; nn.Dropout can be used"
        )
    form = arrangement.build()
    if arrangement.parts == 1 and form.parts() is None:
        raise BadRequest(
            f"parallel={arrangement.form} does not say over how many workers the model is split:"
            " give workers=2, say"
        )
    form.check(model, arrangement.parts)
