"""Check Paceline on the GPUs of this machine: `paceline doctor --gpu`.

Every check is a function of a `Place`: a device and a transport. On a machine with GPUs these are
`cuda` and `nccl`; a rehearsal runs the same checks with `cpu` and `gloo`.

    parity        the weights after a few steps, against those of a reference, within a tolerance
    collectives   sums of whole numbers, which are exact in any order
    resume        a run that is stopped and resumed, against an unbroken one, bit for bit
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch
from torch import Tensor

from paceline import __version__
from paceline.common.devices import look_at, take_device
from paceline.doctor.running import PartFailed, in_child, train_by_command
from paceline.errors import BadRequest
from paceline.launch.capabilities import PROBES
from paceline.launch.forks import on_forked_ranks
from paceline.record.machine import cpu_name
from paceline.record.writer import clean
from paceline.registry import collectives, transports
from paceline.transport.base import Rendezvous, Transport

RANKS = 2
STEPS = 20
# The largest difference of a weight from the reference's, relative to the largest weight of its
# tensor. Sums of float32 in another order differ by about 1e-6 after so few steps.
TOLERANCE = 1e-4
# cuDNN computes convolutions with TF32, which keeps 10 bits of each number.
CONVOLUTION_TOLERANCE = 2e-2
SIZES = (1, 7, 1000, 1 << 20)  # of the buffers that are summed, in numbers
Train = Callable[[Mapping[str, Any], Path], dict[str, Tensor]]


@dataclass(frozen=True)
class Place:
    """Where the checks run."""

    device: str
    transport: str  # between processes
    devices: int  # how many there are; a process needs one of its own
    folder: Path  # for the runs
    data: str = "fashion-mini"
    train: Train = train_by_command
    _kept: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def crowded(self) -> str | None:
        """Why checks of several processes are left out; None: there are enough devices."""
        if self.devices >= RANKS:
            return None
        return f"not checked: it takes {RANKS} devices, one per process, and here is {self.devices}"

    def new_folder(self) -> Path:
        return Path(mkdtemp(dir=self.folder)) / "run"

    def trained(self, options: dict[str, Any]) -> dict[str, Tensor]:
        """Train with these options, once for all checks that need it."""
        key = repr(sorted(options.items()))
        if key not in self._kept:
            self._kept[key] = self.train(options, self.new_folder())
        return self._kept[key]

    def options(self, **given: Any) -> dict[str, Any]:
        """Options of a training: alike in all of them, but for those given."""
        return {
            "data": self.data,
            "model": "mlp",
            "strategy": "serial",
            "workers": 1,
            "global_batch_size": 64,
            "steps": STEPS,
            "lr": 0.05,
            "momentum": 0.9,
            "threads": 1,
            "memory_format": "contiguous",
            "overlap": "off",
            "device": self.device,
            **given,
        }

    def several(self, transport: str, strategy: str, **given: Any) -> dict[str, Any]:
        return self.options(transport=transport, strategy=strategy, workers=RANKS, **given)


@dataclass
class Check:
    """One check and its outcome."""

    name: str
    ok: bool | None = None  # None: it could not be made
    detail: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


# Whether it is right, a sentence, and figures.
Outcome = tuple[bool | None, str, dict[str, float]]
Body = Callable[[], Outcome]


def checks(place: Place) -> Iterator[Check]:
    """Make all checks, one after the other. Those between processes need a device for each."""
    for name, between, body in _bodies(place):
        check, began = Check(name), time.perf_counter()
        if between and place.crowded is not None:
            check.detail = place.crowded
        else:
            try:
                check.ok, check.detail, check.figures = body()
            except PartFailed as failed:
                check.ok, check.detail = False, str(failed)
            check.seconds = round(time.perf_counter() - began, 1)
        yield check


def _bodies(place: Place) -> Iterator[tuple[str, bool, Body]]:
    """The name of each check, whether it is one between processes, and what it does."""
    own = place.transport
    yield "parity: mlp, 1 worker", False, partial(device_parity, place, "mlp", TOLERANCE)
    yield (
        "parity: cnn, 1 worker",
        False,
        partial(device_parity, place, "cnn:dropout=0", CONVOLUTION_TOLERANCE),
    )
    pairs = (("inproc", "native"), (own, "native"), (own, "ring"))
    for transport, name in pairs:
        title = f"parity: {RANKS} workers, {transport}, {name}"
        yield title, transport == own, partial(worker_parity, place, transport, name)
    for entry in collectives:
        if entry.name != "auto":
            yield f"{own}: {entry.name}", True, partial(sums, place, entry.name)
    yield f"{own}: other operations", True, partial(other_operations, place)
    alone = place.options(model="mlp:dropout=0.2", optimizer="adam", momentum=0)
    yield "resume: 1 worker, adam, dropout", False, partial(resume, place, alone)
    for transport in ("inproc", own):
        several = place.several(transport, "allreduce:collective=ring", codec="topk")
        title = f"resume: {RANKS} workers, {transport}, codec topk"
        yield title, transport == own, partial(resume, place, several)


# --- parity


def device_parity(place: Place, model: str, tolerance: float) -> Outcome:
    """Train on the device and on the CPU, with one worker."""
    own = place.trained(place.options(model=model))
    reference = place.trained(place.options(model=model, device="cpu"))
    return _compared(own, reference, tolerance, "the CPU")


def worker_parity(place: Place, transport: str, collective: str) -> Outcome:
    """Train with two workers and with one, on the same batches."""
    several = place.several(transport, f"allreduce:collective={collective}")
    own, reference = place.trained(several), place.trained(place.options())
    return _compared(own, reference, TOLERANCE, "one worker")


def _compared(
    own: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float, whom: str
) -> Outcome:
    found = difference(own, reference)
    sentence = f"weights differ from those of {whom} by {found:.1e} (allowed: {tolerance:.0e})"
    return found <= tolerance, sentence, {"difference": found, "tolerance": tolerance}


def difference(own: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest difference of a weight, relative to the largest weight of its tensor."""
    found = 0.0 if own.keys() == reference.keys() else float("inf")
    for name in own.keys() & reference.keys():
        right = reference[name]
        scale = float(right.double().abs().max()) or 1.0
        apart = float((own[name].double() - right.double()).abs().max()) / scale
        found = max(found, apart if isfinite(apart) else float("inf"))
    return found


# --- the transport


def sums(place: Place, collective: str) -> Outcome:
    """All-reduce whole numbers with one collective: sum, maximum and minimum, of several sizes."""
    wrong = in_child(partial(_on_ranks, place, partial(_wrong_sums, collective)))
    return _exact(wrong, f"{len(SIZES)} sizes; sum, max and min", 3 * len(SIZES))


def other_operations(place: Place) -> Outcome:
    """Every operation that is not an all-reduce: messages, broadcast, gather and so on."""
    wrong = in_child(partial(_on_ranks, place, _wrong_operations))
    return _exact(wrong, ", ".join(PROBES), len(PROBES))


def _exact(wrong: list[str], tried: str, count: int) -> Outcome:
    figures = {"tried": float(count), "wrong": float(len(wrong))}
    if wrong:
        return False, f"wrong results: {', '.join(wrong)}", figures
    return True, f"exact ({tried})", figures


def _on_ranks(place: Place, body: Callable[[Transport, torch.device], list[str]]) -> list[str]:
    results, failures = on_forked_ranks(partial(_rank, place, body), RANKS)
    for failure in failures.values():
        raise failure
    return sorted({name for found in results.values() for name in found})


def _rank(
    place: Place,
    body: Callable[[Transport, torch.device], list[str]],
    rendezvous: Rendezvous,
    say: Any,
) -> list[str]:
    torch.set_num_threads(1)
    device = take_device(place.device, rendezvous.rank)
    transport = transports.entry(place.transport).make.connect(rendezvous)
    try:
        return body(transport, device)
    finally:
        transport.close()


def _wrong_sums(name: str, transport: Transport, device: torch.device) -> list[str]:
    wrong, collective = [], collectives.build(name, transport=transport)
    for size in SIZES:
        ranks = torch.arange(1.0, transport.size + 1).view(-1, 1)
        brought = ranks * (torch.arange(size) % 7 + 1)  # small whole numbers: every sum is exact
        right = {"sum": brought.sum(0), "max": brought.amax(0), "min": brought.amin(0)}
        for op, expected in right.items():
            buffer = transport.allocate(size, torch.float32, device)
            buffer.copy_(brought[transport.rank])
            collective.all_reduce(buffer, op)
            if not torch.equal(buffer.cpu(), expected):
                wrong.append(f"{op} of {size}")
    return wrong


def _wrong_operations(transport: Transport, device: torch.device) -> list[str]:
    def buffer() -> Tensor:
        return torch.full((2,), float(transport.rank + 1), device=device)

    return [name for name, probe in PROBES.items() if not probe(transport, buffer())]


# --- resume


def resume(place: Place, options: dict[str, Any]) -> Outcome:
    """Stop after half of the steps, resume, and compare with an unbroken run, bit for bit."""
    half = {**options, "steps": STEPS // 2, "checkpoint_every": STEPS // 2}
    place.train(half, folder := place.new_folder())
    unbroken = place.trained(options)
    again = place.train({"resume": folder, "steps": STEPS}, folder)
    found = difference(again, unbroken)
    figures = {"difference": found}
    if all(torch.equal(again[k], unbroken[k]) for k in unbroken):
        return True, "bit for bit as the unbroken run", figures
    repeat = difference(place.train(options, place.new_folder()), unbroken)
    figures["repeat_difference"] = repeat
    if repeat:
        return (
            None,
            f"not decided: two unbroken runs differ by {repeat:.1e}, the resumed one by"
            f" {found:.1e}",
            figures,
        )
    return False, f"differs from the unbroken run by {found:.1e}", figures


# --- the file


def described(place: Place, made: list[Check], names: tuple[str, ...]) -> dict[str, Any]:
    """What a person sends back: versions, names of devices and the checks; no paths, no hosts.

    Called last, because asking for versions may initialise CUDA.
    """
    content = {
        "rehearsal": place.device == "cpu",
        "versions": {
            "paceline": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": _nccl_version(),
        },
        "system": platform.system(),
        "machine": platform.machine(),
        "devices": list(names),
        "transport": place.transport,
        "checks": [asdict(check) for check in made],
    }
    return dict(clean(content))


def _nccl_version() -> str | None:
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


@contextmanager
def here(device: str) -> Iterator[tuple[Place, tuple[str, ...]]]:
    """The place for `cuda`, or for a rehearsal on the `cpu`, and the names of its devices."""
    names: tuple[str, ...] = (cpu_name(),)
    if device != "cpu":
        look = look_at(torch.device(device))
        if look.error is not None:
            raise BadRequest(
                f"there is no GPU to check here ({look.error}); paceline doctor --gpu --device cpu"
                " rehearses the checks on the CPU"
            )
        names = look.names
    count = RANKS if device == "cpu" else len(names)
    with TemporaryDirectory(prefix="paceline-gpu-") as folder:
        transport = "gloo" if device == "cpu" else "nccl"
        yield Place(device, transport, count, Path(folder)), names
