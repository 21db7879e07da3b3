"""What a message costs: its size, what a worker sends in a step against a plain ring, and the time
to make and read it.
"""

from __future__ import annotations

import html
from collections.abc import Iterator

from paceline.report.comment import Comment
from paceline.report.lines import Line, Study
from paceline.report.words import percent, size

HARDLY = 0.05  # accuracy below serial's or the best's: it hardly learned


def coded(study: Study) -> list[Line]:
    return [x for x in study.lines if x.completed and x.completed[0].record.get("codec")]


def ring_bytes(line: Line) -> float:
    """What plain float32 costs a worker in one exchange by ring: 2(P-1)/P of it."""
    return (
        2
        * (line.workers - 1)
        / line.workers
        * float(line.completed[0].record["codec"]["plain_bytes"])
    )


def messages_table(study: Study) -> str:
    """HTML; empty where nothing was compressed."""
    lines = coded(study)
    if not lines:
        return ""
    head = (
        "setting",
        "one message",
        "of float32",
        "sent per worker and step",
        "of a plain ring",
        "encode",
        "decode",
        "accuracy",
    )
    rows = []
    for line in lines:
        said = line.completed[0].record["codec"]
        sent, encode, decode = (
            line.per_step(k) for k in ("payload_sent_bytes", "encode_s", "decode_s")
        )
        cells = (
            html.escape(line.id),
            size(said["message_bytes"]),
            f"1/{said['plain_bytes'] / said['message_bytes']:.1f}",
            size(sent.mean if sent else None),
            percent(sent.mean / ring_bytes(line), 1) if sent and ring_bytes(line) else "–",
            f"{1e3 * encode.mean:.2f} ms" if encode else "–",
            f"{1e3 * decode.mean:.2f} ms" if decode else "–",
            percent(line.accuracy.mean if line.accuracy else None),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    note = (
        "<p class=soft>A message is counted with everything in it: values, indices, scales."
        " Messages that cannot be added up (sign, top-k, threshold, QSGD) go from everybody to"
        " everybody, so what a worker sends grows with the number of workers; a ring's share stays"
        " below twice the model. Where weights are exchanged every so many steps, the bytes are"
        " spread over them.</p>"
    )
    titles = "".join(f"<th>{h}</th>" for h in head)
    body = (
        "<div"
        f" class=scroll><table><thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    return f"<section id=messages><h2>What a message costs</h2>{body}{note}</section>"


def what_compression_costs(study: Study) -> Iterator[Comment]:
    """Random-k hardly learns at 1%; and whose encoding takes longer than what it saves."""
    best = max((x.accuracy.mean for x in study.lines if x.accuracy), default=0.0)
    for line in coded(study):
        codec = str(line.completed[0].record["config"].get("codec", ""))
        own = line.accuracy
        if codec.startswith("randomk") and own is not None and own.mean < best - HARDLY:
            yield Comment(
                "codec",
                f"`{line.id}` hardly learned ({percent(own.mean)} against {percent(best)}):"
                " random-k sends each number about once in 1/ratio steps, and stale; it is here as"
                " the baseline that top-k is better than.",
            )
        encode, decode, sync = (line.per_step(k) for k in ("encode_s", "decode_s", "sync_s"))
        if encode and decode and sync and encode.mean + decode.mean > sync.mean > 0:
            spent = 1e3 * (encode.mean + decode.mean)
            yield Comment(
                "codec",
                f"`{line.id}` spends more time on making and reading messages ({spent:.1f} ms a"
                f" step) than on sending them ({1e3 * sync.mean:.1f} ms): the network is too fast"
                " for it to pay.",
            )
