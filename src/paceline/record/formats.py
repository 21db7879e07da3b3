"""The shapes of the files of a run and a study: events, run.json, study.json, checkpoint.json."""

from __future__ import annotations

from typing import Any

from paceline.record.shapes import (
    IfThere,
    Maybe,
    OrNull,
    Values,
    anything,
    finite,
    flag,
    number,
    positive,
    rate,
    seed,
    speed,
    text,
    whole,
)

PREDICTED = "predicted.json"  # in a study's folder: what a plan says (results/foretold.py)
COUNTERS = (
    "cpu_percent",
    "cpu_user_s",
    "cpu_system_s",
    "rss_peak_bytes",
    "pss_peak_bytes",
    "setup_sent_bytes",
    "evaluate_sent_bytes",
    "finish_sent_bytes",
    "disk_read_bytes",
    "disk_write_bytes",
    "net_sent_bytes",
    "net_received_bytes",
    "measured_s",
    "measuring_s",
)
CONTAINER = (  # what a rank's container used while it trained
    "cpu_s",
    "memory_bytes",
    "memory_with_cache_bytes",
    "memory_peak_bytes",
    "net_received_bytes",
    "net_sent_bytes",
    "block_read_bytes",
    "block_write_bytes",
)

_METRIC = Maybe({"name": text, "value": Maybe(finite)})
_MACHINE = Maybe({"cpu_percent": Maybe(number)})
_CONTAINER = IfThere(
    {
        "source": text,
        "from_s": number,
        "until_s": number,
        **{name: Maybe(number) for name in CONTAINER},
    }
)
_PROFILED = [{"name": text, "calls": number, "own_s": number, "total_s": number}]

# in every event
EVENT: dict[str, Any] = {"kind": text, "rank": whole, "session": whole, "t": number}
EVENTS: dict[str, dict[str, Any]] = {  # further fields, by kind
    "start": {
        "host": Maybe(text),
        "boot": Maybe(text),
        "role": IfThere(text),
        "from_step": IfThere(whole),
        "total_steps": Maybe(whole),
        "clock": IfThere(number),
        "memory_format": Maybe(text),
        "message_bytes": IfThere(number),
        "over_network": IfThere(flag),
        "parameters": Maybe(number),
        "split": Maybe(anything),
    },
    "step": {
        "step": whole,
        "epoch": whole,
        "n": number,
        "loss": OrNull(finite),
        "compute_s": number,
        "sync_s": number,
        "train_s": number,
        "sent": number,
        "received": number,
        "messages": number,
        "encode_s": IfThere(number),
        "decode_s": IfThere(number),
        "staleness": Maybe(number),
        "missed": Maybe(number),
        "overlapped": Maybe(rate),
    },
    "evaluation": {
        "step": whole,
        "train_s": number,
        "loss": Maybe(finite),
        "accuracy": Maybe(number),
        "metric": _METRIC,
        "metrics": IfThere(Values(Maybe(finite))),
        "reached": IfThere(flag),
        "on": IfThere(text),
        "best": IfThere(flag),
        "decided_by": IfThere(text),
        "ema": Maybe({"loss": Maybe(finite), "accuracy": Maybe(number), "metric": _METRIC}),
    },
    "balance": {"step": whole, "batch_sizes": [number], "samples_per_s": anything},
    "choice": {"collective": Maybe(Values(text))},
    "failed": {"status": text, "error": text, "follows": flag},
    "distance": {"value": Maybe(finite)},
    "notice": {"text": text},
    "privacy": {"epsilon": number},
    "served": {
        "step": whole,
        "served_sent_bytes": number,
        "served_received_bytes": number,
        "served_messages": number,
    },
    "aside": {"what": text, "began": number, "seconds": number},
    "sample": {
        "elapsed_s": number,
        "cpu_user_s": number,
        "cpu_system_s": number,
        "rss_bytes": number,
        "net_sent_bytes": Maybe(number),
        "net_received_bytes": Maybe(number),
        "disk_read_bytes": Maybe(number),
        "disk_write_bytes": Maybe(number),
    },
    "profile": {
        "functions": _PROFILED,
        "function_steps": whole,
        "operators": _PROFILED,
        "operator_steps": whole,
    },
    "summary": {
        **{name: Maybe(number) for name in COUNTERS},
        "times_known": IfThere(flag),
        "message_bytes": IfThere(number),
        "machine": _MACHINE,
        "container": _CONTAINER,
        "traffic": Maybe([Values(anything)]),
        "served_sent_bytes": Maybe(number),
        "served_received_bytes": Maybe(number),
        "served_messages": Maybe(number),
    },
}
GO_TOGETHER = {  # an event has all of these fields or none
    "start": {"message_bytes": number, "plain_bytes": number},
    "step": {"began": number, "arrived": number, "waits": flag},
}

_WORKER = {
    "rank": whole,
    "container": _CONTAINER,
    "role": text,
    "samples": number,
    "steps": whole,
    "compute_s": OrNull(number),
    "sync_s": OrNull(number),
    "idle_s": OrNull(number),
    "payload_sent_bytes": OrNull(number),
    "payload_received_bytes": OrNull(number),
    "encode_s": Maybe(number),
    "decode_s": Maybe(number),
    "memory_sent_bytes": Maybe(number),
    "parameters": Maybe(number),
    "activation_sent_bytes": Maybe(number),
    "bubble": Maybe(number),
    "split": Maybe(anything),
    "staleness_mean": Maybe(number),
    "staleness_max": Maybe(number),
    "overlap_rate": Maybe(number),
    "replica_distance_max": Maybe(finite),
    **{name: OrNull(number) for name in ("cpu_percent", "rss_peak_bytes")},
    **{name: Maybe(number) for name in COUNTERS if name not in ("cpu_percent", "rss_peak_bytes")},
}

RUN: dict[str, Any] = {
    "status": text,
    "error": OrNull(text),
    "config": {
        "strategy": text,
        "workers": positive,
        "threads": Maybe(anything),
        "seed": Maybe(seed),
        "batch_sizes": Maybe([number]),
        "target_accuracy": Maybe(number),
        "until_accuracy": Maybe(number),
    },
    "environment": {
        "cores": Maybe(positive),
        "slurm": Maybe({"job": whole, "nodes": [text], "partition": Maybe(text)}),
        "ssh": Maybe({"hosts": [text]}),
    },
    "result": {
        "test_accuracy": OrNull(number),
        "test_loss": OrNull(finite),
        "train_loss": OrNull(finite),
        "metric": _METRIC,
        "steps": whole,
        "samples": number,
        "train_s": number,
        "wall_s": number,
        "samples_per_s": OrNull(number),
        "steady_samples_per_s": Maybe(number),
        "metrics": Maybe(Values(Maybe(finite))),
        "validation": Maybe(Values(anything)),
        "ema": Maybe(Values(anything)),
        "best": Maybe({"step": whole, "value": Maybe(finite), "by": text, "on": text}),
        "time_to_accuracy_s": OrNull(number),
        "steps_to_accuracy": OrNull(whole),
    },
    "workers": [_WORKER],
    "model": Maybe({"input_shape": [whole], "classes": OrNull(whole)}),
    "machine": _MACHINE,
    "codec": Maybe({"message_bytes": number, "plain_bytes": number}),
    "lost": Maybe([whole]),
    "simulated": Maybe(flag),  # the times are virtual
    "privacy": Maybe(
        {
            "epsilon": finite,
            "delta": number,
            "epsilon_rdp": finite,
            "noise": number,
            "noise_per_worker": number,
            "clip": number,
            "sampling": text,
            "trust": text,
            "steps": whole,
            "private": flag,
            "guarantee": [text],
        }
    ),
    "data": Maybe(
        {
            "name": text,
            "engine": text,
            "master": OrNull(text),
            "shards": anything,
            "rows": {"train": whole, "test": whole},
            "seconds": Values(number),
            "report": Maybe(
                {
                    "rows_in": IfThere(whole),
                    "broken_lines": IfThere(whole),
                    "dropped": IfThere([{"rows": whole, "why": text}]),
                    "classes": IfThere(Values({"train": whole, "test": whole})),
                }
            ),
        }
    ),
}

_BLOCK = {
    "number": whole,
    "order": [text],
    "samples_per_s": Values(speed),
    "seconds": number,
    "foreign": OrNull(number),
    "stolen": OrNull(number),
    "repeats": whole,
    "disturbed": flag,
}
_CONFIRM = {
    "serial": text,
    "settings": [text],
    "width": number,
    "wanted": whole,
    "block_s": number,
    "ended": text,
    "blocks": [_BLOCK],
}

STUDY: dict[str, Any] = {
    "name": Maybe(text),
    "started": Maybe(number),
    "cut_seeds": Maybe(text),
    "spent_s": Maybe(number),
    "notices": Maybe([{"t": number, "text": text}]),
    "confirm": Maybe(_CONFIRM),
    "environment": IfThere({"cores": positive}),
    "memory_format": IfThere(Values(text)),
    "definition": IfThere(
        {
            **{name: IfThere(text) for name in ("title", "question", "cut", "scaling")},
            **{name: IfThere(Values(anything)) for name in ("base", "axes")},
        }
    ),
    "runs": [
        {
            "name": text,
            "label": text,
            "workers": positive,
            "seed": seed,
            "varied": Values(text),
            "options": IfThere(Values(text)),
        }
    ],
}
BEGUN: dict[str, Any] = {  # what a study needs in addition to go on
    "environment": {"cores": positive},
    "memory_format": Values(text),
    "runs": [{"options": Values(text)}],
}

CHECKPOINT: dict[str, Any] = {
    "step": whole,
    "workers": whole,
    "train_s": number,
    "optimizer": text,
    "samples": OrNull(whole),
    "strategy": IfThere(text),
    "memory_format": IfThere(text),
    "codec": IfThere(text),
    "content": Maybe(text),
    "privacy": Maybe([Values(anything)]),
    "members": IfThere([whole]),
    "files": IfThere(Values(text)),
}


# --- predicted.json

_FORETOLD: dict[str, Any] = {
    "strategy": text,
    "workers": positive,
    "batch_size": positive,
    "samples_per_s": speed,
    "low": speed,
    "high": speed,
}
PREDICTIONS: dict[str, Any] = {
    "written": text,
    "profile": IfThere(text),
    "settings": IfThere([{"label": text, **_FORETOLD}]),
    "own_cores": IfThere(
        {"network": text, "rows": [{"where": text, "speedup": speed, **_FORETOLD}]}
    ),
}
