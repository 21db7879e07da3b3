"""Each warning is shown once, here or by the process that is told of it."""

import warnings
from typing import Any

from paceline.common.warned import show_warning, warnings_once


class OldArgument(UserWarning):
    """A category that only a person's own module knows."""


def warn_twice() -> None:
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old", OldArgument, stacklevel=1)


def test_a_warning_is_shown_once() -> None:
    before = warnings.showwarning
    with warnings.catch_warnings(record=True) as shown, warnings_once():
        warn_twice()
    assert [str(one.message) for one in shown] == ["old"]
    assert warnings.showwarning is before


def test_a_warning_travels_to_another_process() -> None:
    told: list[dict[str, Any]] = []
    with warnings_once(told.append):
        warn_twice()
    assert [(t["text"], t["category"]) for t in told] == [("old", "OldArgument")]
    with warnings.catch_warnings(record=True) as shown, warnings_once():
        show_warning(told[0])
        show_warning(told[0])
    (one,) = shown
    assert (str(one.message), one.category.__name__) == ("old", "OldArgument")
    assert one.filename == __file__
