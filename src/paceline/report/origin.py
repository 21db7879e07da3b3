"""From the raw table to the trained model: the source of prepared data and the time per stage."""

from __future__ import annotations

import html
from typing import Any

from paceline.report.lines import Study
from paceline.report.page.markup import table
from paceline.report.words import percent
from paceline.request.naming import kept_together

STAGES = {
    "start": "starting the engine",
    "read": "reading, joining, filtering",
    "count": "statistics and vocabulary",
    "write": "encoding, writing shards",
}


def origin_table(study: Study) -> str:
    """Return the page's section on prepared data; empty where no data was prepared."""
    runs = [r for line in study.lines for r in line.completed if r.record.get("data")]
    if not runs:
        return ""
    sets: dict[str, dict[str, Any]] = {r.record["config"]["data"]: r.record["data"] for r in runs}
    parts = [_prepared(name, about) for name, about in sets.items()]
    shown = runs[:12]
    head = ("run", "preparing", "training", "whole run", "metric", "accuracy", "epsilon")
    runs_table = table(head, [_row(r.record) for r in shown])
    more = (
        f"<p class=soft>{len(runs) - len(shown)} more runs are in results.csv.</p>"
        if len(runs) > len(shown)
        else ""
    )
    return (
        f"<section id=origin><h2>From the table to the model</h2>{''.join(parts)}{runs_table}{more}"
        "</section>"
    )


def _prepared(name: str, about: dict[str, Any]) -> str:
    found, rows = about.get("report"), about["rows"]  # a private run's record has no exact counts
    came = ""
    if found and "rows_in" in found:
        dropped = "".join(
            f"{d['rows']:,} dropped ({html.escape(d['why'])}); " for d in found.get("dropped", [])
        )
        broken = (
            f"{found['broken_lines']:,} broken lines left out; "
            if found.get("broken_lines")
            else ""
        )
        came = f"{found['rows_in']:,} rows came in; {broken}{dropped}"
    stages = [
        (html.escape(STAGES.get(stage, stage)), f"{seconds:.2f} s")
        for stage, seconds in about["seconds"].items()
    ]
    where = f" at {html.escape(about['master'])}" if about["master"] else ""
    return (
        f"<p><b>{html.escape(name)}</b>: {html.escape(about['name'])}, prepared by"
        f" {html.escape(about['engine'])}{where} into "
        f"{html.escape(str(about['shards']))} shards. {came}{rows['train']:,} to train on,"
        f" {rows['test']:,} to test on.</p>"
        f"{table(('stage', 'time'), stages)}"
    )


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    result, config, metric = record["result"], record["config"], record["result"].get("metric")
    privacy = record.get("privacy")
    return (
        f"{html.escape(kept_together(config))} x {html.escape(str(config['workers']))}",
        f"{sum(record['data']['seconds'].values()):.2f} s",
        f"{result['train_s']:.2f} s",
        f"{result['wall_s']:.2f} s",
        (
            f"{html.escape(metric['name'])} {metric['value']:.4f}"
            if metric and metric.get("value") is not None
            else ""
        ),
        percent(result["test_accuracy"]),
        f"{privacy['epsilon']:.3g} (delta {privacy['delta']:g})" if privacy else "none",
    )
