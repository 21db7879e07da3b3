"""Refuse a study that this machine cannot run at all, before its first run."""

from __future__ import annotations

from paceline.errors import BadRequest
from paceline.registry import Spec, transports
from paceline.studies.grid import StudySpec


def refuse_missing_transport(spec: StudySpec) -> None:
    """Raise if every setting that the study asks for needs a transport that is missing here.

    Where only some settings need it, the others run, and those that cannot are told one by one.
    """
    lacking: dict[str, str] = {}
    for setting in spec.settings():
        if setting.baseline:
            continue
        name = Spec.of(str(setting.options.get("transport", "auto"))).name
        missing = None if name == "auto" else transports.entry(name).make.missing()
        if missing is None:
            return
        lacking[name] = missing
    if lacking:
        name, missing = next(iter(lacking.items()))
        raise BadRequest(
            f"study {spec.name} runs over transport {name}, which is not available here:"
            f" {missing}; or give --set transport=auto"
        )


def refuse_on_a_cluster(spec: StudySpec) -> None:
    """Raise if the study asks for what runs on a Spark cluster cannot do."""
    options = [setting.options for setting in spec.settings()]
    launchers = {str(o.get("launcher", "auto")) for o in options}
    if "ray" in launchers:
        raise BadRequest("launcher=ray: a study runs on this machine, or with launcher=spark")
    if "spark" not in launchers:
        return
    if spec.confirms:
        raise BadRequest(
            "launcher=spark: a study on a cluster screens settings and confirms none; leave out"
            " budget and confirm, or give --confirm 0"
        )
    if any(o.get("privacy") is not None for o in options):
        raise BadRequest("launcher=spark: a study with privacy runs on this machine only")
