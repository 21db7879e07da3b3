"""What Python on a host runs first: it says which Paceline is there, and waits for the word to go.

The launcher sends this file as text over ssh. The host may have another version of Paceline or
none, so that nothing else of Paceline is imported before the launcher has compared the versions.
"""

import json
import os
import sys
from typing import Any


def begin(mark: str) -> None:
    """Greet the launcher. The line that it answers is the supervisor's first order."""
    told: dict[str, Any] = {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "executable": sys.executable,
        "connection": os.environ.get("SSH_CONNECTION", ""),
        "paceline": None,
    }
    try:
        import paceline

        told["paceline"] = paceline.__version__
    except Exception as error:
        told["why"] = "%s: %s" % (type(error).__name__, error)  # noqa: UP031 (an old Python)
    os.write(1, (mark + json.dumps(told) + "\n").encode())
    with open(0, "rb", 0, closefd=False) as inlet:
        order = inlet.readline()
    if not order.endswith(b"\n"):  # the launcher has ended, or does not want this host
        return
    from paceline.launch.ssh.supervisor import Supervisor

    sys.exit(Supervisor().run(order))
