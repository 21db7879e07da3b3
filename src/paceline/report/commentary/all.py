"""Every sentence that the data of a study supports, with the figures behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.report.commentary.accuracy import accuracy_gained, accuracy_paid
from paceline.report.commentary.advice import next_steps
from paceline.report.commentary.comment import Comment
from paceline.report.commentary.confirmation import confirmation
from paceline.report.commentary.costs import along_the_data, bytes_moved, drift, measuring_cost
from paceline.report.commentary.scaling import from_linear
from paceline.report.commentary.selection import selection
from paceline.report.commentary.speed import beyond_the_cores, slower_than_serial, within_noise
from paceline.report.commentary.trouble import (
    disturbed,
    failures,
    not_reached,
    slow_workers,
    unlike_work,
)
from paceline.report.lines import Study
from paceline.report.messages import what_compression_costs
from paceline.report.networks import by_bandwidth
from paceline.report.privacy import what_privacy_costs

RULES: tuple[Callable[[Study], Iterator[Comment]], ...] = (
    failures,
    confirmation,
    disturbed,
    by_bandwidth,
    unlike_work,
    selection,
    accuracy_paid,
    accuracy_gained,
    not_reached,
    within_noise,
    slow_workers,
    slower_than_serial,
    beyond_the_cores,
    what_privacy_costs,
    what_compression_costs,
    bytes_moved,
    from_linear,
    drift,
    along_the_data,
    measuring_cost,
    next_steps,
)


def comments(study: Study) -> list[Comment]:
    """Return the comments of all rules, in the order of the page."""
    return [comment for rule in RULES for comment in rule(study)]
