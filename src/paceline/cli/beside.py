"""Commands that use Spark start again in a container where the cluster is in containers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def beside_the_cluster(
    master: str | None,
    watch: bool = False,
    file: str | None = None,
    without: Sequence[str] = (),
) -> None:
    """Run this command in a driver's container and exit, if the cluster that it uses needs that.

    `file`: one that the command reads. `without`: flags that have been obeyed already.
    """
    from paceline.errors import BadRequest
    from paceline.spark import driver

    cluster = driver.wanted(master)
    if cluster is None:
        return
    if watch:
        raise BadRequest(
            "--watch shows nothing of a run in containers: leave it out, and type paceline watch"
            " DIR beside it"
        )
    if file is not None and not Path(file).resolve().is_relative_to(cluster.folder):
        raise BadRequest(
            f"the containers of the cluster see the folder {cluster.folder}, and {file} is not in"
            " it: copy it there"
        )
    words = [word for word in sys.argv[1:] if word not in without]
    raise SystemExit(driver.run(cluster, ["paceline", *words]))
