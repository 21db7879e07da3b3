"""Device, strategy, servers, transport and overlap: whether they go together, and what `auto`
means.
"""

from __future__ import annotations

import torch

from paceline.codecs.feedback import build_codec
from paceline.common.devices import cuda_names, look_at
from paceline.common.links import Links
from paceline.common.sharing import Sharing
from paceline.common.values import shortened
from paceline.errors import BadRequest, UnknownName
from paceline.registry import Spec, collectives, strategies, transports
from paceline.request.config import Config
from paceline.strategies.base import Strategy, traits_of
from paceline.testbed.build import missing
from paceline.transport.choose import best_transport

ENGINES = ("spark", "ray")  # launchers that start the ranks on machines of a cluster


def device_of(name: str) -> str:
    """Return the device that a name means: `auto` is CUDA, then MPS, then the CPU."""
    if name != "auto":
        check_device(name)
        return name
    return next((d for d in ("cuda", "mps") if look_at(torch.device(d)).error is None), "cpu")


def check_compile(backend: str | None) -> None:
    """Refuse a backend that torch.compile does not have."""
    if backend is not None:
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise UnknownName("backend of torch.compile", backend, known)


def check_device(name: str) -> None:
    """Refuse a device that does not work here. CUDA is not initialised, so ranks can be forked."""
    try:
        device = torch.device(name)
        reason = look_at(device).error
    except RuntimeError as error:  # of torch.device: no such name
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    if reason is not None:
        raise BadRequest(
            f"device={shortened(name)} is not available here, use --device cpu: {reason}"
        )
    if device.type == "cpu" and device.index:
        raise BadRequest(
            f"device={name}: PyTorch counts all cores as one device: write --device cpu"
        )


def check_strategy(config: Config, strategy: Strategy) -> None:
    if not isinstance(strategy, Strategy):
        raise BadRequest(
            f"strategy {config.described()['strategy']} gave a {type(strategy).__name__}, not a"
            " Strategy"
        )
    most, copies = strategy.traits.most_workers, config.arrangement.copies
    if most is not None and copies > most:
        others = ", ".join(e.name for e in strategies if traits_of(e.make).most_workers is None)
        raise BadRequest(
            f"strategy {strategy.name} runs {most} worker, not {copies}: "
            f"use --workers {most}, or another strategy ({others})"
        )


def servers_of(config: Config, strategy: Strategy) -> int:
    """Return the number of servers: 1 by default for a strategy that has servers."""
    if strategy.traits.serves == "ranks":
        if config.servers == 0:
            raise BadRequest(
                f"strategy {strategy.name} needs at least one server: servers=0 is none"
            )
        return 1 if config.servers is None else config.servers
    if config.servers:
        raise BadRequest(
            f"strategy {strategy.name} has no servers: leave servers={config.servers} out"
        )
    return 0


def check_options(config: Config, strategy: Strategy, servers: int) -> None:
    """Refuse options that this strategy cannot honour."""
    if config.privacy is not None:
        for name, why in (
            ("accumulate", "a private step draws its own random batch"),
            ("clip_norm", "privacy clips each sample's gradient: set its clip"),
            ("precision", "sensitivities are proved for full precision"),
            ("compile", "private training looks into the model's layers"),
        ):
            if getattr(config, name) != Config.options()[name].default:
                raise BadRequest(f"{name} cannot be used with privacy: {why}")
    if config.clip_norm is not None and servers > 1:
        raise BadRequest(
            f"clip_norm requires one server: none of {servers} servers has the whole gradient. Use"
            " --servers 1"
        )
    traits = strategy.traits
    if config.precision == "fp16" and not traits.in_step and traits.exchanges != "nothing":
        raise BadRequest(
            f"precision=fp16: when gradients overflow, all workers skip the step together, and"
            f" workers of {config.described()['strategy']} do not wait for each other: use bf16"
        )


def overlap_of(config: Config, transport: str, sharing: Sharing) -> str:
    """Return "on" or "off". `auto` is on where every worker has a spare core for the exchange."""
    if transports.entry(transport).make.traits.runs_as == "threads":
        if config.overlap == "on":
            raise BadRequest(
                f"overlap=on needs processes: ranks of transport {transport} take turns"
            )
        return "off"
    if build_codec(config.codec).lossless is False:
        if config.overlap == "on":
            raise BadRequest(
                f"overlap=on: codec {Spec.of(config.codec).name} needs all gradients at once"
            )
        return "off"
    if config.precision == "fp16":
        if config.overlap == "on":
            raise BadRequest(
                "overlap=on: with precision=fp16 the workers agree that all gradients are finite"
                " before they exchange them"
            )
        return "off"
    if config.parallel is not None:
        if config.overlap == "on":
            raise BadRequest("overlap=on cannot be used with parallel: gradients come in pieces")
        return "off"
    if config.overlap != "auto":
        return config.overlap
    return "on" if config.workers > 1 and sharing.fits(config.workers, more=1) else "off"


def transport_of(config: Config, strategy: Strategy) -> str:
    spec = Spec.of(config.transport)
    name = spec.name
    if config.network is not None:
        name = _on_hosts(config, strategy, name)
    if name == "auto":  # all workers are on this host
        name = best_transport(config.device if config.workers > 1 else "cpu")
    # Ranks that mpirun or srun has started need no mpirun on their own host, so what is lacking is
    # told when they are started.
    kind = transports.entry(name).make
    if kind.traits.started_by != "mpirun" and (lacking := kind.missing()) is not None:
        raise BadRequest(f"transport {name} is not available here: {lacking}; use --transport auto")
    if kind.traits.runs_as == "threads" and config.launcher in ENGINES:
        raise BadRequest(
            f"launcher={config.launcher} starts a process for each rank, and transport {name} has"
            " all ranks in one: leave the launcher out"
        )
    if "cpu" not in kind.traits.devices and config.workers > (gpus := len(cuda_names())):
        raise BadRequest(
            f"transport {name} needs a GPU per worker: {config.workers} workers, but this host has"
            f" {gpus}. Use --workers {gpus}, or --transport gloo --device cpu"
        )
    if (
        strategy.traits.needs_shared_memory
        and config.workers > 1
        and not transports.entry(name).make.traits.shares_memory
    ):
        raise BadRequest(
            f"strategy {strategy.name} needs memory that all workers share: one host, and"
            f" --transport shm, not {name}"
        )
    if strategy.traits.needs_processes and transports.entry(name).make.traits.runs_as == "threads":
        raise BadRequest(
            f"strategy {strategy.name} needs real processes: use --transport gloo, not {name}"
        )
    if (
        strategy.traits.needs_second_channel
        and config.workers > 1
        and not kind.traits.second_channel
    ):
        fit = [e.name for e in transports if e.make.traits.second_channel and e.make.available()]
        raise BadRequest(
            f"strategy {strategy.name} needs a second channel, which transport {name} does not"
            f" have: use --transport {' or '.join(fit)}"
        )
    return name


def without_effect(config: Config, strategy: Strategy) -> list[str]:
    """Return notices about options that change nothing in this run."""
    notices = []
    if config.workers == 1 and config.partition == "by-label":
        notices.append("partition=by-label changes nothing: one worker has all labels")
    if (size := _group(strategy)) is not None and size > config.workers > 1:
        notices.append(
            f"hierarchical:group={size} with {config.workers} workers is one group, a tree"
        )
    return notices


def _group(strategy: Strategy) -> int | None:
    """Return the size of the groups of a hierarchical collective, where it is given."""
    given = Spec.of(str(getattr(strategy, "collective", "auto")))
    if given.name != "hierarchical":
        return None
    asked: int | None = collectives.resolve(given).options.get("group")
    return asked


def _on_hosts(config: Config, strategy: Strategy, name: str) -> str:
    """Return the transport between hosts that share only the network: a testbed's, or simulated."""
    if config.network != "standing":
        Links.read(str(config.network))
    if name != "auto" and transports.entry(name).make.traits.virtual_time:
        if config.network == "standing":
            raise BadRequest(
                f"network=standing: transport {name} describes its network and has no hosts: use"
                " --network 100mbit,latency=1ms"
            )
        return name
    if (reason := missing()) is not None:
        raise BadRequest(f"network={config.network}: {reason}")
    if name == "auto":
        return best_transport(config.device, several_hosts=True)
    if not transports.entry(name).make.traits.crosses_hosts:
        across = [e.name for e in transports if e.make.traits.crosses_hosts and e.make.available()]
        raise BadRequest(
            f"network={config.network}: hosts talk over the network, so transport"
            f" {' or '.join(across)}, not {name}"
        )
    return name
