"""What a plan says of a study: its settings before they are run, and workers with a core each.

`predicted.json` in the folder of a study holds both; the report shows them beside what was
measured, marked as predicted. Nothing here changes what a study measures or says of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.common.cores import cores
from paceline.common.files import write_whole
from paceline.errors import BadRequest, PacelineError
from paceline.planning.answer import built
from paceline.planning.cluster import MEMORY, Cluster, read_link
from paceline.planning.from_run import profile_of_run
from paceline.planning.predict import Prediction, Setting, predict
from paceline.planning.profile import Profile, now
from paceline.planning.stored import read_profile
from paceline.planning.workers import worker_of
from paceline.record.formats import PREDICTED
from paceline.registry import Spec
from paceline.report.lines import Line, Study
from paceline.studies.grid import Setting as StudySetting
from paceline.transport.virtual import Link

SCHEMA = 1
MORE_WORKERS = (2, 4, 8, 16)
NETWORK = "lan"
MOST_STRATEGIES = 12
SYNCHRONOUS = ("allreduce", "ring-reduce", "stepwise")  # their records tell how long steps take


# --- the settings of a study, before they are run


def foretell_settings(settings: Sequence[StudySetting], path: str, folder: Path) -> None:
    """Predict the settings of a study from a profile, and write that down."""
    profile = read_profile(path)
    _same_model(profile, settings)
    rows, refused = [], []
    for setting in settings:
        try:
            said = _on_this_machine(setting, profile)
        except BadRequest as error:
            refused.append(f"{setting.label} x {setting.workers}: {error}")
            continue
        rows.append(
            {"label": setting.label, "strategy": setting.strategy, **_row(said, setting.workers)}
        )
    if not rows:
        raise BadRequest(f"--plan {path}: no setting of the study can be predicted: {refused[0]}")
    _write(folder, {"profile": Path(path).name, "settings": rows, "refused": refused})


def _same_model(profile: Profile, settings: Sequence[StudySetting]) -> None:
    asked = {str(setting.options.get("model", "cnn")) for setting in settings}
    if asked != {profile.model.name}:
        raise BadRequest(
            f"the profile is of {profile.model.name}, and the study trains"
            f" {', '.join(sorted(asked))}: profile that by paceline profile --model"
            f" {sorted(asked - {profile.model.name})[0]}"
        )


def _on_this_machine(setting: StudySetting, profile: Profile) -> Prediction:
    options, workers = setting.options, setting.workers
    if options.get("threads") not in (None, "auto", profile.compute.threads):
        raise BadRequest(f"the profile is of workers with {profile.compute.threads} thread each")
    batch = _batch(options, workers)
    codec = str(options.get("codec") or "none")
    worker, _ = worker_of(profile)(batch, codec)
    network = options.get("network")
    if network is not None:
        cluster = Cluster(read_link(str(network)))
    else:
        link = profile.link(str(options.get("transport") or "shm")) or profile.link("gloo")
        inside = Link(link.latency_s, link.s_per_byte) if link else MEMORY
        cluster = Cluster(Link(), inside, per_host=workers, cores=cores())
        if workers > 1 and profile.compute.together:
            slower = profile.compute.together
            worker = replace(worker, quantiles_s=[slower * q for q in worker.quantiles_s])
    strategy = built(setting.strategy)
    servers = int(options.get("servers") or 1) if strategy.traits.serves == "ranks" else 0
    return predict(Setting(strategy, codec, workers, servers), worker, cluster)


def _batch(options: dict[str, Any], workers: int) -> int:
    own, whole = options.get("batch_size"), options.get("global_batch_size")
    if own is not None and not isinstance(own, int):
        raise BadRequest(f"batch_size={own}: a plan needs one number for all workers")
    return own or round(int(whole or 64 * workers) / workers)


# --- workers with a core each, after the study has run


def foretell_cores(study: Study) -> None:
    """Predict, from the study's own records, what more workers with a core each would do.

    Says nothing where the records do not allow it: a study of another kind, or of private training.
    """
    try:
        profile = _profile_of(study)
        rows = _with_own_cores(study, profile)
    except PacelineError:
        return
    if rows:
        _write(study.folder, {"own_cores": {"network": NETWORK, "rows": rows}})


def _profile_of(study: Study) -> Profile:
    """A profile of the study's serial run, and of those with two workers for a smaller batch."""
    found = profile_of_run(_serial(study).completed[0].folder)
    steps = {each.batch_size: each for each in found.compute.steps}
    for line in study.lines:
        pair = line.workers == 2 and not line.oversubscribed and line.completed
        if pair and Spec.of(line.strategy).name in SYNCHRONOUS:
            for each in profile_of_run(line.completed[0].folder).compute.steps:
                steps.setdefault(each.batch_size, each)
    ordered = tuple(steps[size] for size in sorted(steps))
    return replace(found, compute=replace(found.compute, steps=ordered))


def _serial(study: Study) -> Line:
    for line in study.lines:
        if line.strategy == "serial" and line.threads == 1 and line.completed:
            return line
    raise BadRequest("the study has no serial run on one thread")


def _with_own_cores(study: Study, profile: Profile) -> list[dict[str, Any]]:
    config = _serial(study).completed[0].record["config"]
    worker_at = worker_of(profile)
    alone = _at("serial", 1, config, Cluster(Link()), worker_at).samples_per_s
    rows: list[dict[str, Any]] = []
    names = dict.fromkeys(
        line.strategy for line in study.lines if line.workers > 1 and not line.varied.get("codec")
    )
    for name in list(names)[:MOST_STRATEGIES]:
        for where, cluster in (
            ("one machine", Cluster(Link(), per_host=max(MORE_WORKERS))),
            (NETWORK, Cluster(read_link(NETWORK))),
        ):
            for workers in MORE_WORKERS:
                try:
                    said = _at(name, workers, config, cluster, worker_at)
                except BadRequest:
                    continue
                row = {"strategy": name, "where": where, **_row(said, workers)}
                rows.append({**row, "speedup": said.samples_per_s / alone})
    return rows


def _at(
    name: str, workers: int, config: dict[str, Any], cluster: Cluster, worker_at: Callable[..., Any]
) -> Prediction:
    worker, _ = worker_at(_batch(config, workers), "none")
    strategy = built(name)
    servers = 1 if strategy.traits.serves == "ranks" and workers > 1 else 0
    return predict(Setting(strategy, "none", workers, servers), worker, cluster)


def _row(said: Prediction, workers: int) -> dict[str, Any]:
    return {
        "workers": workers,
        "batch_size": said.batch_size,
        "samples_per_s": said.samples_per_s,
        "low": said.low,
        "high": said.high,
    }


def _write(folder: Path, part: dict[str, Any]) -> None:
    """Add a part to the file of predictions."""
    path = folder / PREDICTED
    before: dict[str, Any] = {}
    if path.exists():
        try:
            before = json.loads(path.read_text())
        except ValueError:
            before = {}
    folder.mkdir(parents=True, exist_ok=True)
    content = {**before, "schema": SCHEMA, "written": now(), **part}
    write_whole(path, json.dumps(content, indent=1) + "\n")
