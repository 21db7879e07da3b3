"""The data report: rows that were read, rows that were dropped and why, rows that remain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.data.manifest import Manifest

if TYPE_CHECKING:
    from paceline.data.prepare.counts import Counts
    from paceline.data.prepare.encode import Encoder
    from paceline.data.prepare.placing import Placing


def report(counts: Counts, placing: Placing, encoder: Encoder) -> dict[str, Any]:
    """Return the data report as plain values, for the manifest."""
    from paceline.data.prepare.counts import BROKEN, KEPT, TEST, TRAIN
    from paceline.data.prepare.encode import shown

    dropped = [
        {"why": why, "rows": counts.why[i]}
        for i, why in enumerate(placing.reasons(), start=2)
        if counts.why[i]
    ]
    kept = counts.why[KEPT]
    classes = {}
    if encoder.classes is not None:
        classes = {
            shown(c): {"train": counts.targets[TRAIN][c], "test": counts.targets[TEST][c]}
            for c in encoder.classes
        }
    return {
        "rows_in": counts.rows,
        "broken_lines": counts.why[BROKEN],
        "broken_lines_of_joined_tables": counts.broken_joined,
        "bad_numbers": counts.bad_numbers,
        "dropped": dropped,
        "rows_kept": kept,
        "missing": {name: n for name, n in counts.missing.items() if n},
        "classes": classes,
        "constant_columns": list(encoder.constants()),
    }


def as_text(manifest: Manifest) -> str:
    """Return the data report as Markdown."""
    found, rows = manifest.report, {part: manifest.rows(part) for part in ("train", "test")}
    lines = [
        (
            f"# {manifest.name}, prepared by"
            f" {manifest.engine}{' at ' + manifest.master if manifest.master else ''}"
        ),
        "",
    ]
    lines += ["| rows | |", "|---|--:|", f"| in | {found['rows_in']:,} |"]
    if found["broken_lines"]:
        lines.append(f"| broken lines, left out | {found['broken_lines']:,} |")
    lines += [f"| dropped: {d['why']} | {d['rows']:,} |" for d in found["dropped"]]
    lines += [f"| training part | {rows['train']:,} |", f"| test part | {rows['test']:,} |", ""]
    if found["classes"]:
        lines += ["| class | train | | test | |", "|---|--:|--:|--:|--:|"]
        for name, n in found["classes"].items():
            shares = [
                f"{n[part]:,} | {n[part] / max(1, rows[part]):.1%}" for part in ("train", "test")
            ]
            lines.append(f"| {name} | {shares[0]} | {shares[1]} |")
        lines.append("")
    width = manifest.inputs["shape"]
    if manifest.columns:
        lines.append(
            f"{len(manifest.columns)} columns become {width[0]} numbers per row; {_sizes(manifest)}"
        )
    else:
        lines.append(f"Images of {' x '.join(map(str, width))} bytes; {_sizes(manifest)}")
    if found["missing"]:
        kept = max(1, found["rows_kept"])
        most = sorted(found["missing"].items(), key=lambda item: -item[1])[:8]
        lines.append(
            "Missing values: " + ", ".join(f"{name} {n / kept:.1%}" for name, n in most) + "."
        )
    if found["bad_numbers"]:
        lines.append(
            f"{found['bad_numbers']:,} values that should be numbers are not; they count as"
            " missing."
        )
    if found["broken_lines_of_joined_tables"]:
        lines.append(
            f"{found['broken_lines_of_joined_tables']:,} broken lines in the joined tables were"
            " left out."
        )
    if found["constant_columns"]:
        lines.append(f"Constant columns: {', '.join(found['constant_columns'])}.")
    lines.append(
        "Seconds: " + ", ".join(f"{stage} {s:.2f}" for stage, s in manifest.seconds.items()) + "."
    )
    return "\n".join(lines) + "\n"


def _sizes(manifest: Manifest) -> str:
    size = sum(s.inputs.bytes + s.targets.bytes for s in manifest.shards)
    return f"{len(manifest.shards)} shards, {size / 1e6:,.1f} MB."
