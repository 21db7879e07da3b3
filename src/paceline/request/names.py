"""Every name that a person wrote, looked up in its registry."""

from __future__ import annotations

from typing import Any

from paceline.errors import BadRequest, UnknownName
from paceline.registry import (
    Spec,
    codecs,
    collectives,
    faults,
    losses,
    metrics,
    models,
    optimizers,
    schedules,
    sources,
    strategies,
    transports,
)
from paceline.request.callbacks import check_callbacks
from paceline.request.config import Config


def resolve_names(config: Config) -> Config:
    """Return the config with all names looked up and their options checked. Refuses
    unknown names.
    """
    changes: dict[str, Any] = {}
    for name, registry in (
        ("strategy", strategies),
        ("codec", codecs),
        ("model", models),
        ("optimizer", optimizers),
        ("lr_schedule", schedules),
        ("loss", losses),
        ("metric", metrics),
        ("data", sources),
    ):
        value = getattr(config, name)
        if isinstance(value, Spec) and not (
            name in ("loss", "metric") and value.name in ("auto", "none")
        ):
            changes[name] = registry.resolve(value)
    if isinstance(config.metric, tuple):
        changes["metric"] = tuple(
            metrics.resolve(each) if isinstance(each, Spec) else each for each in config.metric
        )
    given = Spec.of(config.transport)
    if given.name not in ("auto", *transports.names()):
        raise UnknownName("transport", given.name, ["auto", *transports.names()])
    if given.rest or given.options:
        raise BadRequest(
            f"transport {given}: transports have no options; the network between the ranks is"
            " given by --network 100mbit,latency=1ms"
        )
    strategy = changes.get("strategy")
    collective = (
        Spec.of(str(strategy.options.get("collective", "auto"))).name if strategy else "auto"
    )
    if collective not in ("auto", *collectives.names()):
        raise UnknownName("collective", collective, ["auto", *collectives.names()])
    for fault in config.faults:
        faults.build(fault, runs_as="processes")
    changes["callbacks"] = check_callbacks(config.callbacks)
    return config.merged(changes)
