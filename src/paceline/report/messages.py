"""The cost of a compressed message: its size, the bytes per step against a plain ring, and the time
of encoding and decoding.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from paceline.report.columns import bytes_heading
from paceline.report.command import command_of
from paceline.report.commentary.comment import Comment, told
from paceline.report.lines import Line, Study
from paceline.report.page.markup import table
from paceline.report.words import percent, size

HARDLY = 0.05  # accuracy below the best of the study: it hardly learned


def coded(study: Study) -> list[Line]:
    """Return the settings with a codec."""
    return [x for x in study.lines if x.completed and x.completed[0].record.get("codec")]


def ring_bytes(line: Line) -> float:
    """Return what a worker sends in a ring all-reduce of uncompressed float32: 2(P-1)/P of it."""
    return (
        2
        * (line.workers - 1)
        / line.workers
        * float(line.completed[0].record["codec"]["plain_bytes"])
    )


def messages_table(study: Study) -> str:
    """Return the page's section on messages; empty where nothing was compressed."""
    lines = coded(study)
    if not lines:
        return ""
    head = (
        "setting",
        "one message",
        "of float32",
        bytes_heading(study).replace("bytes", "sent"),
        "of a plain ring",
        "encode",
        "decode",
        "accuracy",
    )
    rows = []
    for line in lines:
        said = line.completed[0].record["codec"]
        sent = line.bytes_per_step("payload_sent_bytes")
        encode, decode = line.per_step("encode_s"), line.per_step("decode_s")
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
        rows.append(cells)
    note = (
        "<p class=soft>The size of a message includes values, indices and scales. Messages that"
        " cannot be added (sign, top-k, threshold, QSGD) go from every worker to every other, so"
        " the bytes that a worker sends grow with the number of workers; with a ring they stay"
        " below twice the model. Strategies that exchange weights every few steps spread the bytes"
        " over those steps.</p>"
    )
    return f"<section id=messages><h2>What a message costs</h2>{table(head, rows)}{note}</section>"


def _topk(randomk: str) -> str:
    """Return the codec that sends the largest numbers instead, as many."""
    ratio = re.search(r"ratio=[^,]+", randomk)
    return f"topk:{ratio[0]}" if ratio else "topk"


def what_compression_costs(study: Study) -> Iterator[Comment]:
    """Name settings that hardly learned with random-k, and those that encode longer than send."""
    best = max((x.accuracy.mean for x in study.lines if x.accuracy), default=0.0)
    for line in coded(study):
        codec = str(line.completed[0].record["config"].get("codec", ""))
        own = line.accuracy
        if codec.startswith("randomk") and own is not None and own.mean < best - HARDLY:
            yield Comment(
                "codec",
                f"`{line.id}` hardly learned ({percent(own.mean)} against {percent(best)}):"
                " random-k sends each number about once in 1/ratio steps, and then it is stale. It"
                " is a baseline for top-k.",
                commands=told(command_of(study, line, codec=_topk(codec))),
            )
        encode, decode, sync = (line.per_step(k) for k in ("encode_s", "decode_s", "sync_s"))
        if encode and decode and sync and encode.mean + decode.mean > sync.mean > 0:
            spent = 1e3 * (encode.mean + decode.mean)
            yield Comment(
                "codec",
                f"`{line.id}` spent more time on encoding and decoding ({spent:.1f} ms per step)"
                f" than on the exchange ({1e3 * sync.mean:.1f} ms): a cheaper codec can save"
                " more time than smaller messages.",
                commands=told(command_of(study, line, codec="bf16")) if codec != "bf16" else (),
            )
