"""Checkpoints: a folder per step, written aside and renamed, so that one is whole or not there.

checkpoints/step-00000100/
  model.safetensors     the consensus weights, as the plain model's state dict
  worker-0.pt ...       per worker: optimizer, random state, place in the data, what its strategy remembers
  checkpoint.json       step, workers, seconds trained
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.common.files import rename_whole, sync, write_whole
from paceline.errors import BadRequest, DataCorrupt, RunFailed
from paceline.record.formats import CHECKPOINT
from paceline.record.shapes import fault
from paceline.record.writer import clean

KEEP = 2  # the last checkpoints that stay
# safetensors has no such type: saved as pairs of float64, and named so in the file's metadata
WIDE = "complex128"


def save(
    folder: Path,
    step: int,
    rank: int,
    weights: dict[str, Tensor] | None,
    own: dict[str, Any],
    about: dict[str, Any],
    barrier: Callable[[], None],
) -> Path:
    """Called by all workers together; `weights` on worker 0 only. What one rescues alone replaces
    nothing that all made.

    Where one cannot be finished, each worker removes what it has written (it would keep a full disk
    full), and the launcher removes the folder when no worker writes to it any more.
    """
    final, aside = folder / f"step-{step:08d}", folder / f".step-{step:08d}.part"
    if not about["workers"] and final.is_dir():
        return final
    try:
        if rank == 0:
            sweep(folder)
            aside.mkdir(parents=True)
        barrier()
        _write_own(aside / f"worker-{rank}.pt", own)
        if rank == 0 and weights is not None:
            _write_weights(aside / "model.safetensors", weights)
            (aside / "checkpoint.json").write_text(json.dumps(clean(about), indent=2) + "\n")
            sync(aside / "checkpoint.json")
        barrier()
        if rank == 0:
            rename_whole(aside, final)
            _prune(folder)
        barrier()
    except BaseException as error:
        with contextlib.suppress(OSError):
            for name in (
                f"worker-{rank}.pt",
                *(("model.safetensors", "checkpoint.json") if rank == 0 else ()),
            ):
                (aside / name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise RunFailed(
                f"the checkpoint at step {step} cannot be written to {folder}: {reason}"
            ) from None
        raise
    return final


def _write_own(path: Path, own: dict[str, Any]) -> None:
    with open(path, "wb") as file:
        try:
            torch.save(own, file)
        except RuntimeError as error:  # of torch's archive, which hides what the system said
            reason: BaseException | None = error
            while reason is not None and not isinstance(reason, OSError):
                reason = reason.__context__
            raise reason or error from None
        file.flush()
        os.fsync(file.fileno())


def sweep(folder: Path) -> None:
    """Remove what a checkpoint that was never finished has left."""
    for abandoned in folder.glob(".step-*.part"):
        shutil.rmtree(abandoned, ignore_errors=True)


def _prune(folder: Path) -> None:
    """The last ones stay, and the last one that all workers made: what one of them has rescued does
    not replace it.
    """
    found = _all(folder)
    whole = next((path for path in reversed(found) if _is_whole(path)), None)
    for old in found[:-KEEP]:
        if old != whole:
            shutil.rmtree(old, ignore_errors=True)


def _is_whole(checkpoint: Path) -> bool:
    try:
        return bool(about(checkpoint)["workers"])
    except DataCorrupt:
        return False


def _all(folder: Path) -> list[Path]:
    """The checkpoints in a folder, in the order of their steps; what else lies there is none."""
    steps = {
        int(found[1]): path
        for path in folder.glob("step-*")
        if (found := re.fullmatch(r"step-([0-9]{8,18})", path.name))
    }
    return [steps[step] for step in sorted(steps)]


def forget_after(folder: Path, step: int) -> None:
    """Going back to a checkpoint undoes the later ones."""
    for path in _all(folder):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path, ignore_errors=True)


def latest(out: Path) -> Path:
    """The newest checkpoint below a run's folder (or that folder itself, when it is one)."""
    if (out / "checkpoint.json").is_file():
        return out
    found = [path for path in _all(out / "checkpoints") if (path / "checkpoint.json").is_file()]
    if not found:
        raise BadRequest(
            f"{out} has no checkpoint to resume from (a run makes them with --checkpoint-every)"
        )
    return found[-1]


def latest_whole(out: Path) -> Path:
    """The newest one that all workers have made; what one of them has rescued, alone, only where
    there is nothing better.
    """
    return next(
        (path for path in reversed(_all(out / "checkpoints")) if _is_whole(path)), None
    ) or latest(out)


def about(checkpoint: Path) -> dict[str, Any]:
    try:
        content = json.loads((checkpoint / "checkpoint.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DataCorrupt(f"{checkpoint / 'checkpoint.json'} cannot be read: {error}") from None
    if (wrong := fault(content, CHECKPOINT)) is not None:
        raise DataCorrupt(
            f"{checkpoint / 'checkpoint.json'} is not a checkpoint's description: {wrong}"
        )
    return dict(content)


def load_own(checkpoint: Path, rank: int) -> dict[str, Any]:
    path = checkpoint / f"worker-{rank}.pt"
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load raises many kinds for a damaged file
        raise DataCorrupt(
            f"{path} cannot be read:"
            f" {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from None
    needed = {
        "optimizer",
        "random",
        "generators",
        "strategy",
        "epoch_start",
        "batches",
        "samples_seen",
    }
    if not isinstance(content, dict) or not needed <= content.keys():
        raise DataCorrupt(f"{path} is not a worker's part of a checkpoint")
    return content


def save_weights(path: Path, state: dict[str, Tensor]) -> None:
    try:
        write_whole(path, lambda aside: _write_weights(aside, state), durable=True)
    except OSError as error:
        raise RunFailed(f"{path} cannot be written: {error.strerror or error}") from None


def _write_weights(path: Path, state: dict[str, Tensor]) -> None:
    """With the mode that other new files have: safetensors' own is readable by its owner only."""
    wide = [name for name, tensor in state.items() if tensor.dtype is torch.complex128]
    pairs = {name: torch.view_as_real(state[name].resolve_conj()).contiguous() for name in wide}
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({**state, **pairs}, path, {WIDE: json.dumps(wide)} if wide else None)
    except SafetensorError as error:
        told = re.search(r"os error ([0-9]+)", str(error))
        raise (
            OSError(int(told[1]), os.strerror(int(told[1]))) if told else OSError(str(error))
        ) from None
    path.chmod(mode)
    sync(path)


def load_weights(path: Path) -> dict[str, Tensor]:
    try:
        state: dict[str, Tensor] = load_file(path)
        with safe_open(path, framework="pt") as file:
            wide = json.loads((file.metadata() or {}).get(WIDE, "[]"))
        # A copy: the file's memory is aligned for float64, and torch ends the process on complex128
        # that is not aligned for it.
        return {**state, **{name: torch.view_as_complex(state[name].clone()) for name in wide}}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DataCorrupt(f"{path} cannot be read: {error}") from None


def refuse_unsaveable(model: nn.Module) -> None:
    """Before the first step: a run whose weights cannot be saved would lose everything at
    its end.
    """
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and not _can_be_saved(tensor.dtype):
            raise BadRequest(
                f"{name} is {tensor.dtype}, which cannot be saved (safetensors has no such type):"
                " make it another, for example with .to(torch.float32) or .to(torch.complex64)"
            )


@cache
def _can_be_saved(dtype: torch.dtype) -> bool:
    try:
        safetensors.torch.save({"x": torch.empty(0, dtype=dtype)})
    except Exception:  # torch and safetensors raise several kinds for types that they do not know
        return dtype is torch.complex128
    return True
