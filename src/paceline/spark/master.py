"""Which master a driver uses: the one that was asked for, or the cluster that is up."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

from paceline.errors import BadRequest
from paceline.spark.java import given_master

REACH_S = 5.0  # how long a master may take to accept a connection


def conf_of(master: str) -> Path | None:
    """Return the folder with settings and secret if `master` is this machine's cluster."""
    from paceline.spark.standalone import standing

    cluster = standing()
    return cluster.conf_dir if cluster is not None and cluster.master == master else None


def check_master(master: str) -> None:
    """Refuse at once what is no master or does not answer. Spark itself would retry for minutes."""
    if (
        re.fullmatch(r"local(\[(\*|\d+)(,\d+)?\])?", master)
        or master in ("yarn",)
        or master.startswith("k8s://")
    ):
        return
    if re.fullmatch(r"spark://[^:/,]+:\d+(,[^:/,]+:\d+)*", master) is None:
        raise BadRequest(f"master={master}: write local[*], local[4] or spark://host:port")
    for place in master.removeprefix("spark://").split(","):
        host, port = place.split(":")
        try:
            socket.create_connection((host, int(port)), REACH_S).close()
            return
        except (OSError, OverflowError) as error:  # OverflowError: no such port
            reason = getattr(error, "strerror", None) or str(error)
    raise BadRequest(
        f"master={master} does not answer: {reason}. Is it up? (paceline cluster status)"
    )


def usual_master(asked: str = "") -> str:
    """Return the master that was asked for, or the default.

    That is the one of the program's own session, of the container that this runs in, or of this
    machine's cluster. Without a cluster (`paceline cluster up`) it is local[*].
    """
    if asked not in ("", "containers"):
        return asked
    if "pyspark" in sys.modules and not asked:
        from pyspark.sql import SparkSession

        if (active := SparkSession.getActiveSession()) is not None:
            return str(active.sparkContext.master)
    if (given := given_master()) is not None:
        return given
    from paceline.spark.driver import wanted
    from paceline.spark.standalone import standing

    if wanted(asked) is not None:
        raise BadRequest(
            "the Spark cluster is in containers, and executors there cannot call this program back:"
            " start it in a container, too: paceline cluster run -- python PROGRAM"
        )
    cluster = standing()
    return cluster.master if cluster is not None else "local[*]"
