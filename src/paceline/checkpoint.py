"""Checkpoints: a folder per step, written aside and renamed, so that one is whole or not there.

checkpoints/step-00000100/
  model.safetensors     the consensus weights, as the plain model's state dict
  worker-0.pt ...       per worker: optimizer, random state, place in the data, what its strategy remembers
  checkpoint.json       step, workers, seconds trained
"""

from __future__ import annotations

import json
import os
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

from paceline.errors import BadRequest, DataCorrupt, RunFailed
from paceline.record.writer import write_json

KEEP = 2  # the last checkpoints that stay
WIDE = "complex128"  # safetensors has no such type: saved as pairs of float64, and named so in the file's metadata


def save(
    folder: Path,
    step: int,
    rank: int,
    weights: dict[str, Tensor] | None,
    own: dict[str, Any],
    about: dict[str, Any],
    barrier: Callable[[], None],
) -> Path:
    """Called by all workers together; `weights` on worker 0 only. What one rescues alone replaces nothing that all made."""
    final, aside = folder / f"step-{step:08d}", folder / f".step-{step:08d}.part"
    if not about["workers"] and final.is_dir():
        return final
    try:
        if rank == 0:
            for abandoned in folder.glob(".step-*.part"):
                shutil.rmtree(abandoned, ignore_errors=True)
            aside.mkdir(parents=True)
        barrier()
        with open(aside / f"worker-{rank}.pt", "wb") as file:
            torch.save(own, file)
            file.flush()
            os.fsync(file.fileno())
        if rank == 0 and weights is not None:
            save_weights(aside / "model.safetensors", weights)
            write_json(aside / "checkpoint.json", about)
        barrier()
        if rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            os.replace(aside, final)
            for old in sorted(folder.glob("step-*"))[:-KEEP]:
                shutil.rmtree(old, ignore_errors=True)
        barrier()
    except OSError as error:
        raise RunFailed(f"the checkpoint at step {step} cannot be written: {error.strerror or error}") from None
    return final


def forget_after(folder: Path, step: int) -> None:
    """Going back to a checkpoint undoes the later ones."""
    for path in folder.glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path, ignore_errors=True)


def latest(out: Path) -> Path:
    """The newest checkpoint below a run's folder (or that folder itself, when it is one)."""
    if (out / "checkpoint.json").is_file():
        return out
    found = sorted((out / "checkpoints").glob("step-*/checkpoint.json"))
    if not found:
        raise BadRequest(f"{out} has no checkpoint to resume from (a run makes them with --checkpoint-every)")
    return found[-1].parent


def latest_whole(out: Path) -> Path:
    """The newest one that all workers have made; what one of them has rescued, alone, only where there is nothing better."""
    found = [path.parent for path in sorted((out / "checkpoints").glob("step-*/checkpoint.json"))]
    return next((path for path in reversed(found) if about(path)["workers"]), None) or latest(out)


def about(checkpoint: Path) -> dict[str, Any]:
    try:
        content = json.loads((checkpoint / "checkpoint.json").read_text())
    except (OSError, ValueError) as error:
        raise DataCorrupt(f"{checkpoint / 'checkpoint.json'} cannot be read: {error}") from None
    if not isinstance(content, dict) or not {"step", "workers", "train_s", "optimizer", "samples"} <= content.keys():
        raise DataCorrupt(f"{checkpoint / 'checkpoint.json'} is not a checkpoint's description")
    return content


def load_own(checkpoint: Path, rank: int) -> dict[str, Any]:
    path = checkpoint / f"worker-{rank}.pt"
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load raises many kinds for a damaged file
        raise DataCorrupt(
            f"{path} cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from None
    return dict(content)


def save_weights(path: Path, state: dict[str, Tensor]) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    wide = [name for name, tensor in state.items() if tensor.dtype is torch.complex128]
    pairs = {name: torch.view_as_real(state[name].resolve_conj()).contiguous() for name in wide}
    try:
        save_file({**state, **pairs}, aside, {WIDE: json.dumps(wide)} if wide else None)
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise RunFailed(f"{path} cannot be written: {error}") from None


def load_weights(path: Path) -> dict[str, Tensor]:
    try:
        state: dict[str, Tensor] = load_file(path)
        with safe_open(path, framework="pt") as file:
            wide = json.loads((file.metadata() or {}).get(WIDE, "[]"))
        # A copy: the file's memory is aligned for float64, and torch ends the process on complex128 that is not aligned for it.
        return {**state, **{name: torch.view_as_complex(state[name].clone()) for name in wide}}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DataCorrupt(f"{path} cannot be read: {error}") from None


def refuse_unsaveable(model: nn.Module) -> None:
    """Before the first step: a run whose weights cannot be saved would lose everything at its end."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and not _can_be_saved(tensor.dtype):
            raise BadRequest(
                f"{name} is {tensor.dtype}, which cannot be saved (safetensors has no such type): make it another, "
                "for example with .to(torch.float32) or .to(torch.complex64)"
            )


@cache
def _can_be_saved(dtype: torch.dtype) -> bool:
    try:
        safetensors.torch.save({"x": torch.empty(0, dtype=dtype)})
    except Exception:  # torch and safetensors raise several kinds for types that they do not know
        return dtype is torch.complex128
    return True
