"""Checkpoints: one folder per step, written under another name and renamed when it is complete.

checkpoints/step-00000100/
  model.safetensors     the consensus weights, as the plain model's state dict
  optimizer.safetensors the optimizer's tensors, only of a model that is split over workers
  worker-0.pt ...       per worker: optimizer, random state, place in the data, strategy's state
  checkpoint.json       step, workers, members, strategy, codec, optimizer, a checksum per file

A folder that is damaged is named, and the one before it is used. Nothing is deleted before its
successor is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.common.files import rename_whole, sync, usual_mode, write_whole
from paceline.common.shortage import why_not_written
from paceline.errors import BadRequest, DataCorrupt, RunFailed
from paceline.record.formats import CHECKPOINT
from paceline.record.keep import Keep
from paceline.record.shapes import fault
from paceline.record.writer import clean

BEST = "best"  # the file that names the checkpoint of the best evaluation
# safetensors has no such type: it is saved as pairs of float64, and the metadata says so
WIDE = "complex128"


def save(
    folder: Path,
    step: int,
    rank: int,
    weights: dict[str, Tensor] | None,
    own: dict[str, Any],
    about: dict[str, Any],
    barrier: Callable[[], None],
    resumed_at: int | None = None,
    keep: Keep | None = None,
    best: bool = False,
    files: Mapping[str, Callable[[Path], None]] | None = None,
) -> Path:
    """Save a checkpoint. All workers call this together; only worker 0 gives `weights`.

    A worker that saves alone after the others died (`about["workers"]` is 0) does not replace a
    checkpoint that all workers made. `resumed_at`: the step from which the run went on; later
    checkpoints, which it has left behind, are removed when this one is whole. `best`: it is that of
    the best evaluation so far. `files`: what several workers write together, instead of `weights`;
    worker 0 and those that take part give the same names. If a checkpoint cannot be finished, each
    worker removes its own files, which may have filled the disk, and the launcher removes the
    folder after the workers have ended.
    """
    final, aside = folder / f"step-{step:08d}", folder / f".step-{step:08d}.part"
    if not about["workers"] and final.is_dir():
        return final
    collected = False  # whether worker 0 takes the other workers' files over
    try:
        if rank == 0:
            sweep(folder)
            aside.mkdir(parents=True)
        barrier()
        _write_own(aside / f"worker-{rank}.pt", own)
        _leave_checksum(aside / f"worker-{rank}.pt")
        if rank == 0 and weights is not None:
            with usual_mode(aside / "model.safetensors"):
                _write_weights(aside / "model.safetensors", weights)
            _leave_checksum(aside / "model.safetensors")
        for name, write in (files or {}).items():
            _write_together(aside / name, write, rank)
        barrier()
        collected = True
        if rank == 0:
            said = {**about, "files": _collect_checksums(aside)}
            (aside / "checkpoint.json").write_text(json.dumps(clean(said), indent=2) + "\n")
            sync(aside / "checkpoint.json")
            _put(aside, final)
            if resumed_at is not None:
                forget_after(folder, resumed_at, but=final)
            if best:
                write_whole(folder / BEST, final.name + "\n")
            _prune(folder, keep or Keep())
        barrier()
    except BaseException as error:
        own_files = [f"worker-{rank}.pt"] if rank == 0 or not collected else []
        with contextlib.suppress(OSError):
            for name in (
                *own_files,
                *(("model.safetensors", "checkpoint.json", *(files or ())) if rank == 0 else ()),
            ):
                (aside / name).unlink(missing_ok=True)
                (aside / f".{name}.sha256").unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise RunFailed(
                f"the checkpoint at step {step} cannot be written to {folder}:"
                f" {why_not_written(error)}"
            ) from None
        raise
    return final


def _write_together(path: Path, write: Callable[[Path], None], rank: int) -> None:
    if rank:
        write(path)
        return
    with usual_mode(path):
        write(path)
    sync(path)
    _leave_checksum(path)


def _put(aside: Path, final: Path) -> None:
    """Rename a whole checkpoint; one of the same step is removed afterwards, not before."""
    before = final.with_name(f".{final.name}.old")
    if final.is_dir():
        shutil.rmtree(before, ignore_errors=True)
        final.rename(before)
    rename_whole(aside, final)
    shutil.rmtree(before, ignore_errors=True)


def _recover(folder: Path) -> None:
    """Give a checkpoint its name back that a run was replacing when it was killed."""
    for before in folder.glob(".step-*.old"):
        final = before.with_name(before.name[1 : -len(".old")])
        if final.exists():
            shutil.rmtree(before, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                before.rename(final)


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _leave_checksum(path: Path) -> None:
    """Write a file's checksum beside it, for worker 0, which collects them."""
    path.with_name(f".{path.name}.sha256").write_text(_checksum(path))


def _collect_checksums(folder: Path) -> dict[str, str]:
    found = {}
    for beside in sorted(folder.glob(".*.sha256")):
        found[beside.name[1 : -len(".sha256")]] = beside.read_text()
        beside.unlink()
    return found


def _write_own(path: Path, own: dict[str, Any]) -> None:
    with open(path, "wb") as file:
        try:
            torch.save(own, file)
        except RuntimeError as error:  # torch's archive hides the OSError behind it
            reason: BaseException | None = error
            while reason is not None and not isinstance(reason, OSError):
                reason = reason.__context__
            raise reason or error from None
        file.flush()
        os.fsync(file.fileno())


def sweep(folder: Path) -> None:
    """Remove what is left of checkpoints that were not finished."""
    for abandoned in folder.glob(".step-*.part"):
        shutil.rmtree(abandoned, ignore_errors=True)


def _prune(folder: Path, keep: Keep) -> None:
    """Remove old checkpoints, but keep those asked for and the last that all workers made."""
    if keep.last is None:
        return
    found = _all(folder)
    kept = {next((path for path in reversed(found) if _is_whole(path)), None)}
    kept |= set(found[-keep.last :] if keep.last else ())
    if keep.best:
        kept.add(best_of(folder))
    for old in found:
        if old not in kept:
            _remove(old)


def _remove(path: Path) -> None:
    """Remove a checkpoint. A run that is killed meanwhile leaves nothing that looks like one."""
    aside = path.with_name(f".{path.name}.part")  # `sweep` removes it
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def best_of(folder: Path) -> Path | None:
    """Return the checkpoint of the best evaluation, if it was kept."""
    try:
        path = folder / (folder / BEST).read_text().strip()
    except OSError:
        return None
    return path if path.is_dir() and path.name.startswith("step-") else None


def _is_whole(checkpoint: Path) -> bool:
    """Whether all workers made it."""
    try:
        return bool(about(checkpoint)["workers"])
    except DataCorrupt:
        return False


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files; None: nothing."""
    try:
        said = about(checkpoint)
    except DataCorrupt as error:
        return str(error)
    for name, expected in said.get("files", {}).items():
        try:
            if _checksum(checkpoint / name) != expected:
                return f"{checkpoint / name} is not as it was written"
        except OSError as error:
            return f"{checkpoint / name} cannot be read: {error.strerror}"
    return None


def _all(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, in the order of their steps."""
    steps = {
        int(found[1]): path
        for path in folder.glob("step-*")
        if (found := re.fullmatch(r"step-([0-9]{8,18})", path.name))
    }
    return [steps[step] for step in sorted(steps)]


def forget_after(folder: Path, step: int, but: Path | None = None) -> None:
    """Remove the checkpoints after a step, which a run that went on from there has left behind."""
    for path in _all(folder):
        if int(path.name.removeprefix("step-")) > step and path != but:
            _remove(path)


def latest(out: Path, whole: bool = False) -> tuple[Path, str | None]:
    """Return the checkpoint of a run's folder to go on from, and a notice about damaged ones.

    It is the newest that is not damaged; with `whole`, the newest that all workers made, if there
    is one. A folder that is itself a checkpoint is returned, or refused if it is damaged.
    """
    if (out / "checkpoint.json").is_file():
        if (wrong := damage(out)) is not None:
            raise DataCorrupt(f"the checkpoint {out} is damaged: {wrong}")
        return out, None
    _recover(out / "checkpoints")
    found = [path for path in _all(out / "checkpoints") if (path / "checkpoint.json").is_file()]
    found.reverse()
    if not found:
        raise BadRequest(
            f"{out} has no checkpoint to resume from (a run makes them with --checkpoint-every)"
        )
    wrongs: list[str] = []
    for path in sorted(found, key=lambda path: not _is_whole(path)) if whole else found:
        if (wrong := damage(path)) is None:
            told = f"{'; '.join(wrongs)}: going on from {path.name}, the one before"
            return path, told if wrongs else None
        wrongs.append(f"the checkpoint {path.name} is damaged ({wrong})")
    raise DataCorrupt(f"{out} has no checkpoint that can be used: {'; '.join(wrongs)}")


def about(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's checkpoint.json."""
    try:
        content = json.loads((checkpoint / "checkpoint.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DataCorrupt(f"{checkpoint / 'checkpoint.json'} cannot be read: {error}") from None
    if (wrong := fault(content, CHECKPOINT)) is not None:
        raise DataCorrupt(
            f"{checkpoint / 'checkpoint.json'} is not a checkpoint's description: {wrong}"
        )
    return dict(content)


def members(checkpoint: Path, said: dict[str, Any]) -> frozenset[int]:
    """The workers that have a part in a checkpoint; 0.1.0 did not save which."""
    if "members" in said:
        return frozenset(said["members"])
    return frozenset(w for w in range(said["workers"]) if (checkpoint / f"worker-{w}.pt").is_file())


def load_own(checkpoint: Path, rank: int) -> dict[str, Any]:
    """Read a worker's part of a checkpoint."""
    path = checkpoint / f"worker-{rank}.pt"
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load raises many types of errors for a damaged file
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
    """Write a state dict as safetensors, whole or not at all."""
    try:
        write_whole(path, lambda aside: _write_weights(aside, state), durable=True)
    except OSError as error:
        raise RunFailed(f"{path} cannot be written: {why_not_written(error)}") from None


def _write_weights(path: Path, state: dict[str, Tensor]) -> None:
    """Write and sync a file; safetensors lets only the owner read it (`usual_mode`)."""
    wide = [name for name, tensor in state.items() if tensor.dtype is torch.complex128]
    pairs = {name: torch.view_as_real(state[name].resolve_conj()).contiguous() for name in wide}
    try:
        save_file({**state, **pairs}, path, {WIDE: json.dumps(wide)} if wide else None)
    except SafetensorError as error:
        told = re.search(r"os error ([0-9]+)", str(error))
        raise (
            OSError(int(told[1]), os.strerror(int(told[1]))) if told else OSError(str(error))
        ) from None
    sync(path)


def load_weights(path: Path) -> dict[str, Tensor]:
    try:
        state: dict[str, Tensor] = load_file(path)
        with safe_open(path, framework="pt") as file:
            wide = json.loads((file.metadata() or {}).get(WIDE, "[]"))
        # A copy, because the file's memory is aligned for float64 only, and torch crashes on
        # complex128 that is not aligned.
        return {**state, **{name: torch.view_as_complex(state[name].clone()) for name in wide}}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DataCorrupt(f"{path} cannot be read: {error}") from None


def refuse_unsaveable(model: nn.Module) -> None:
    """Refuse a model whose weights cannot be saved, before the first step."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and not _can_be_saved(tensor.dtype):
            raise BadRequest(
                f"{name} is {tensor.dtype}, which cannot be saved (safetensors has no such type):"
                " convert it, for example with .to(torch.float32) or .to(torch.complex64)"
            )


@cache
def _can_be_saved(dtype: torch.dtype) -> bool:
    try:
        safetensors.torch.save({"x": torch.empty(0, dtype=dtype)})
    except Exception:  # torch and safetensors raise several types of errors for unknown dtypes
        return dtype is torch.complex128
    return True
