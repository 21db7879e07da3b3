"""One self-contained page: works offline, on a phone, in print, light and dark."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from paceline.report.answer import answer, best_lines
from paceline.report.charts import Chart, Charts
from paceline.report.comment import Comment
from paceline.report.commentary import comments
from paceline.report.lines import Line, Study
from paceline.report.messages import messages_table
from paceline.report.origin import origin_table
from paceline.report.privacy import privacy_table
from paceline.report.profiles import profile_tables
from paceline.report.score import score_of
from paceline.report.tables import Row, measured, verdicts
from paceline.report.words import count, percent, size, times, with_range

COMPARED = (
    ("train_s", "training time", "s", "low"),
    ("samples_per_s", "samples per second", "", "high"),
    ("speedup_serial", "speedup against serial", "x", "high"),
    ("efficiency", "efficiency", "percent", "high"),
    ("accuracy", "test accuracy", "percent", "high"),
    ("test_loss", "test loss", "", "low"),
    ("epsilon", "epsilon", "", "low"),
    ("time_to_accuracy_s", "time to the target accuracy", "s", "low"),
    ("steps_to_accuracy", "steps to the target accuracy", "", "low"),
    ("compute_ms", "computing per step", "ms", ""),
    ("codec_ms", "encoding and decoding per step", "ms", "low"),
    ("sync_ms", "exchange per step", "ms", "low"),
    ("idle_ms", "waiting per step", "ms", "low"),
    ("sent_bytes", "bytes per worker and step", "bytes", "low"),
    ("net_sent_bytes", "... over the network", "bytes", ""),
    ("memory_sent_bytes", "... through shared memory", "bytes", ""),
    ("cpu_percent", "CPU of a worker (%)", "", ""),
    ("rss_peak_bytes", "peak memory of a worker", "bytes", ""),
    ("pss_peak_bytes", "... shared pages in parts", "bytes", ""),
    ("staleness", "staleness", "", "low"),
    ("distance", "distance between replicas", "", "low"),
)
GLYPHS = {
    "circle": "M8 3a5 5 0 1 0 .01 0z",
    "square": "M3.5 3.5h9v9h-9z",
    "triangle-up": "M8 3l5.5 10h-11z",
    "diamond": "M8 2l5 6-5 6-5-6z",
    "cross": "M6 3h4v3h3v4h-3v3H6v-3H3V6h3z",
    "triangle-down": "M8 13L2.5 3h11z",
}


def page(study: Study, charts: Charts, drawn: Sequence[Chart], library: str) -> str:
    """The whole document; `library` is the JavaScript that draws."""
    data = {
        "series": charts.series,
        "default_workers": charts.default_workers,
        "default_line": charts.default_line,
        "charts": {c.name: {"table": c.table, "spec": c.spec} for c in drawn},
        "tables": {
            name: rows
            for name, rows in charts.tables.items()
            if name == "lines" or any(c.table == name for c in drawn)
        },
        "compared": [c for c in (_metric_compared(study), *COMPARED) if c],
        "verdicts": verdicts(study),
    }
    body = "\n".join(
        (
            _head(study),
            "<main>",
            _answer(study),
            _comments(comments(study)),
            _controls(charts),
            *_sections(charts, drawn),
            messages_table(study),
            origin_table(study),
            privacy_table(study),
            _pairs(charts),
            profile_tables(study),
            _results(study),
            _configuration(study),
            "</main>",
            (
                "<footer>Made by Paceline"
                f" {html.escape(str(study.environment.get('paceline', '')))} from the records in"
                f" this folder; <code>paceline report {html.escape(str(study.folder))}</code> makes"
                " it again.</footer>"
            ),
        )
    )
    return document(study.title, body, data, library, "page.js")


def _metric_compared(study: Study) -> tuple[str, str, str, str] | None:
    score = score_of(study)
    return (
        None
        if score.is_accuracy
        else ("metric", f"test {score.name}", "", "high" if score.higher_is_better else "low")
    )


def document(title: str, body: str, data: dict[str, Any], library: str, script: str) -> str:
    """A page with everything inside."""
    library = library.replace("</script", "<\\/script")
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    folder = files("paceline.report")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon"'
        ' href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{folder.joinpath('page.css').read_text()}</style>\n</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="data">{content}</script>\n'
        f"<script>{library}</script>\n"
        f"<script>{folder.joinpath(script).read_text()}</script>\n</body>\n</html>\n"
    )


def prose(text: str) -> str:
    """Escaped, with `names` set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[int] = ()) -> str:
    """Cells are HTML already."""
    lines = [
        "<div class=scroll><table><thead><tr>",
        *(f"<th>{h}</th>" for h in head),
        "</tr></thead><tbody>",
    ]
    for number, row in enumerate(rows):
        lines.append(
            f"<tr{' class=best' if number in marked else ''}>"
            + "".join(f"<td>{cell}</td>" for cell in row)
            + "</tr>"
        )
    return "".join([*lines, "</tbody></table></div>"])


# --- the parts


def _head(study: Study) -> str:
    question = html.escape(str(study.definition.get("question", "")))
    started = study.about.get("started")
    when = time.strftime("%d %B %Y", time.localtime(started)) if started else ""
    env = study.environment
    machine = (
        f"{env.get('cpu', '')}, {env.get('cores', '?')} cores, torch {env.get('torch', '')}, Python"
        f" {env.get('python', '')}"
    )
    done = sum(len(x.completed) for x in study.lines)
    work = f"{_all(study, 'model')} on {_all(study, 'data')}"
    facts = ", ".join(x for x in (count(done, "run"), count(study.seeds, "seed"), when) if x)
    facts = f"{html.escape(work)}: {facts}"
    return (
        f"<header><div><h1>{html.escape(study.title)}</h1><p"
        f" class=soft>{question}{'; ' if question else ''}{facts}.<br>{html.escape(machine)}</p></div><button"
        " id=theme type=button>light / dark</button></header>"
    )


def _all(study: Study, option: str) -> str:
    found = list(dict.fromkeys(str(r.record["config"].get(option)) for r in study.runs))
    return found[0] if len(found) == 1 else f"{len(found)} kinds of {option}"


def _answer(study: Study) -> str:
    sentences = "".join(f"<p>{prose(s)}</p>" for s in answer(study))
    notes = []
    cut = str(study.definition.get("cut", ""))
    if cut:
        notes.append(f"Cut to be quick: {cut}.")
    if study.about.get("cut_seeds"):
        notes.append(f"For lack of time {study.about['cut_seeds']} were run.")
    if any(x.oversubscribed for x in best_lines(study)):
        notes.append(
            f"† oversubscribed: more workers and servers than the {study.cores} cores; those times"
            " hold for this machine only."
        )
    target, score = study.target, score_of(study)
    beside = not score.is_accuracy and any(x.accuracy for x in study.lines)
    head = [
        "setting",
        "best<br>workers",
        "training",
        "against<br>serial",
        f"test<br>{html.escape(score.name)}",
    ]
    head += ["test<br>accuracy"] * beside
    head += [f"time to<br>{100 * target:g}%"] if target is not None else []
    head += ["bytes per worker<br>and step", "exchange,<br>waiting"]
    rows = []
    for line in best_lines(study):
        found = measured(study, line)
        sync, idle = line.share("sync_s"), line.share("idle_s")
        sent = line.per_step("payload_sent_bytes")
        row = [
            _name(line),
            _workers(line),
            with_range(found["train_s"], ".2f", 1, " s"),
            times(found["speedup_serial"].mean if found["speedup_serial"] else None),
            _score(study, line),
        ]
        row += [with_range(found["accuracy"], ".2f", 100, "%")] * beside
        if target is not None:
            row.append(
                with_range(found["time_to_accuracy_s"], ".2f", 1, " s")
                if found["time_to_accuracy_s"]
                else "not reached"
            )
        row += [size(sent.mean) if sent and line.workers > 1 else "–"]
        row += [
            (
                f"{percent(sync, 0)}, {percent(idle, 0)}"
                if sync is not None and idle is not None and line.workers > 1
                else "–"
            )
        ]
        rows.append(row)
    under = "".join(f"<p class=note>{prose(n)}</p>" for n in notes)
    servers = any(x.servers for x in study.lines)
    means = (
        "<p class=note>Means over the runs, with the lowest and the highest run in brackets; each"
        " setting at its own best "
        "number of"
        f" workers.{' Bytes are those that a worker sends; what servers send is not in them.' * servers}</p>"
    )
    return (
        f'<section class=answer id="answer">{sentences}{table(head, rows)}{means}{under}</section>'
    )


def _name(line: Line) -> str:
    return f"<code>{html.escape(line.label)}</code>"


def _workers(line: Line) -> str:
    return html.escape(str(line.workers)) + (" †" if line.oversubscribed else "")


def _score(study: Study, line: Line) -> str:
    """The metric that was asked for, with its range."""
    score = score_of(study)
    return (
        with_range(score.spread(line), ".2f", 100, "%")
        if score.is_accuracy
        else with_range(score.spread(line), ".4g")
    )


def _comments(found: Sequence[Comment]) -> str:
    if not found:
        return ""
    items = []
    for comment in found:
        figures = "".join(
            f"<dt>{prose(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in comment.figures.items()
        )
        behind = (
            f" <details class=figures><summary>figures</summary><dl>{figures}</dl></details>"
            if figures
            else ""
        )
        kind = ' class="warn"' if comment.kind in ("failed", "slower", "slow worker") else ""
        items.append(f"<li><span{kind}>{prose(comment.text)}</span>{behind}</li>")
    shown, rest = items[:10], items[10:]
    more = (
        f"<details><summary>{len(rest)} more</summary><ul"
        f" class=comments>{''.join(rest)}</ul></details>"
        if rest
        else ""
    )
    return (
        '<section id="comments"><h2>What was seen</h2><ul'
        f" class=comments>{''.join(shown)}</ul>{more}</section>"
    )


def _controls(charts: Charts) -> str:
    chips = []
    for series in charts.series:
        colour, shape = charts.colours[series]
        glyph = (
            f'<svg width=14 height=14 viewBox="0 0 16 16" aria-hidden=true><path fill="{colour}"'
            f' d="{GLYPHS[shape]}"/></svg>'
        )
        name = html.escape(series)
        chips.append(
            "<label class=chip><input type=checkbox checked"
            f' data-series="{name}">{glyph}{name}</label>'
        )
    counts = sorted({r["workers"] for r in charts.lines})
    options = "".join(
        f"<option{' selected' if c == charts.default_workers else ''}>{html.escape(str(c))}</option>"
        for c in counts
    )
    choose = (
        f"<label class='chip pick'>workers <select id=workers>{options}</select></label>"
        if len(counts) > 1
        else ""
    )
    both = (
        "<button type=button data-choose=all>all</button><button type=button"
        " data-choose=none>none</button>"
    )
    return (
        '<div class=controls role="group" aria-label="what the charts'
        f' show">{"".join(chips)}{both}{choose}</div>'
    )


def _sections(charts: Charts, drawn: Sequence[Chart]) -> list[str]:
    found: dict[str, list[Chart]] = {}
    for chart in drawn:
        found.setdefault(chart.section, []).append(chart)
    parts = []
    for section, members in found.items():
        choose = ""
        if section == "Each worker":
            ids = "".join(
                f"<option{' selected' if r['id'] == charts.default_line else ''}>{html.escape(r['id'])}</option>"
                for r in charts.lines
            )
            choose = f"<div class=row><label>setting <select id=line>{ids}</select></label></div>"
        figures = "".join(
            f"<figure><h3>{html.escape(c.title)}</h3><div class=chart "
            f"data-chart={c.name}></div><figcaption>{html.escape(c.note)}</figcaption></figure>"
            for c in members
        )
        parts.append(
            f"<section><h2>{html.escape(section)}</h2>{choose}<div"
            f" class=grid>{figures}</div></section>"
        )
    return parts


def _pairs(charts: Charts) -> str:
    if len(charts.lines) < 2:
        return ""
    first = next(
        (r["id"] for r in charts.lines if r["strategy"] == "serial"), charts.lines[0]["id"]
    )
    second = charts.default_line if charts.default_line != first else charts.lines[1]["id"]

    def options(chosen: str) -> str:
        return "".join(
            f"<option{' selected' if r['id'] == chosen else ''}>{html.escape(r['id'])}</option>"
            for r in charts.lines
        )

    return (
        "<section><h2>Any two, side by side</h2><div class=row><label>one <select"
        f" id=one>{options(first)}</select></label><label>other <select"
        f" id=other>{options(second)}</select></label></div><div"
        " class=scroll><table><thead><tr><th></th><th>one</th><th>other</th><th>other /"
        " one</th><th class=text>verdict</th></tr></thead><tbody"
        " id=pair></tbody></table></div></section>"
    )


def _results(study: Study) -> str:
    score = score_of(study)
    beside = not score.is_accuracy and any(x.accuracy for x in study.lines)
    head = [
        "setting",
        "workers",
        "threads",
        "runs",
        "training",
        "samples/s",
        "own<br>speedup",
        "against<br>serial",
        "efficiency",
        html.escape(score.name),
    ]
    head += ["accuracy"] * beside + ["bytes per<br>worker, step", "CPU", "peak<br>memory"]
    rows = []
    for line in study.lines:
        if not line.completed:
            rows.append([_name(line), html.escape(str(line.workers)), "", "0", "failed"])
            continue
        m: dict[str, Any] = measured(study, line)

        def mean(
            key: str, form: str, scale: float = 1.0, unit: str = "", m: dict[str, Any] = m
        ) -> str:
            return "–" if m[key] is None else f"{m[key].mean * scale:{form}}{unit}"

        rows.append(
            [
                _name(line),
                _workers(line),
                str(line.threads),
                str(len(line.completed)),
                with_range(m["train_s"], ".2f", 1, " s"),
                mean("samples_per_s", ",.0f"),
                mean("speedup", ".2f", 1, "x"),
                mean("speedup_serial", ".2f", 1, "x"),
                mean("efficiency", ".0f", 100, "%"),
                _score(study, line),
                *([with_range(m["accuracy"], ".2f", 100, "%")] * beside),
                size(m["sent_bytes"].mean if m["sent_bytes"] else None),
                mean("cpu_percent", ".0f", 1, "%"),
                size(m["rss_peak_bytes"].mean if m["rss_peak_bytes"] else None),
            ]
        )
    note = "<p class=note>One row per run is in <code>results.csv</code>.</p>"
    return f"<section><h2>All results</h2>{table(head, rows)}{note}</section>"


def _configuration(study: Study) -> str:
    definition = study.definition
    first = study.runs[0].record
    told = {k: v for k, v in first["environment"].items() if v not in (None, "")}
    machine = "".join(
        f"<dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd>" for k, v in told.items()
    )
    parts = [f"<section><h2>To repeat it</h2><dl>{machine}</dl>"]
    if definition:
        own_batch = "batch_size" in definition.get("base", {}) or "batch_size" in definition.get(
            "axes", {}
        )
        batch = "the same batch for every worker" if own_batch else "the same global batch"
        strong = f"{batch} and the same samples for every number of workers (strong scaling)"
        weak = "the same batch and number of steps for each worker (weak scaling)"
        parts.append(
            "<p>Fair means here: the same model, data, initial weights (by seed), memory format"
            f" and evaluation for all; {weak if definition.get('scaling') == 'weak' else strong};"
            " one thread per worker; runs in random order, seed by seed; start-up, loading and"
            " evaluation not in the training time.</p>"
        )
        parts.append(
            "<details><summary>the"
            f" study</summary><pre><code>{_json(definition)}</code></pre></details>"
        )
        chosen = study.about.get("memory_format") or {}
        if chosen:
            told_formats = ", ".join(f"{v} for {k}" for k, v in chosen.items())
            parts.append(
                "<p class=note>Memory format, measured once and used for all:"
                f" {html.escape(told_formats)}.</p>"
            )
    parts.append(
        "<details><summary>the resolved configuration of the first "
        f"run</summary><pre><code>{_json(first['config'])}</code></pre></details>"
    )
    machines = first.get("machine")
    if machines:
        parts.append(
            "<details><summary>what the container used during the first "
            f"run</summary><pre><code>{_json(machines)}</code></pre></details>"
        )
    return "".join([*parts, "</section>"])


def _json(value: Row) -> str:
    return html.escape(json.dumps(value, indent=2))
