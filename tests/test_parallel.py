"""What runs under pytest-xdist starts no process: the guard in conftest.py sees to it."""

import os
import subprocess
import sys

import pytest

from tests import conftest

pytestmark = pytest.mark.skipif(not conftest.XDIST, reason="only a worker of pytest-xdist refuses")


@pytest.mark.parametrize(
    "start",
    [
        os.fork,
        lambda: os.system("true"),
        lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    ],
    ids=["fork", "system", "subprocess"],
)
def test_a_process_is_refused_under_xdist(start) -> None:
    with pytest.raises(RuntimeError, match="mark it `processes`"):
        start()
    assert conftest.started  # the test would fail at its end, had it caught the error
    conftest.started.clear()
