"""The results of one run as rows of (name, value): the terminal and the notebook show them."""

from __future__ import annotations

from typing import Any

from paceline.request.naming import kept_together


def result_rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the results of a run, the metric that was asked for first. What is unknown is left
    out.
    """
    result, config = record["result"], record["config"]
    rows = [
        ("test accuracy", percent(result["test_accuracy"])),
        ("test loss", number(result["test_loss"], ".4f")),
        ("train loss, last epoch", number(result["train_loss"], ".4f")),
        ("steps", f"{result['steps']:,}"),
        ("samples", f"{result['samples']:,}"),
        ("training time", f"{result['train_s']:.2f} s"),
        ("samples per second", number(result["samples_per_s"], ",.0f")),
        ("total (wall clock)", f"{result['wall_s']:.2f} s"),
    ]
    metric, private = result["metric"], record.get("privacy")
    rows[2:2] = _further(result, metric)
    if private:
        rows.insert(1, (f"epsilon at delta {private['delta']:g}", f"{private['epsilon']:.3g}"))
    if metric and metric["name"] != "accuracy":  # the metric that was asked for is first
        rows.insert(0, (f"test {metric['name']}", number(metric["value"], ".4g")))
    target = config.get("target_accuracy") or config.get("until_accuracy")
    if target is not None:
        reached = result["time_to_accuracy_s"]
        goal = f"{100 * target:g}% accuracy after"
        rows.append(
            (
                goal,
                (
                    "not reached"
                    if reached is None
                    else f"{reached:.2f} s, {result['steps_to_accuracy']:,} steps"
                ),
            )
        )
    return [row for row in rows if row[1] != "-"]


def _further(result: dict[str, Any], metric: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the other metrics, the moving average's loss, the validation set, the best step."""
    said = ("accuracy", (metric or {}).get("name"))
    rows = [
        (f"test {name}", number(value, ".4g"))
        for name, value in (result.get("metrics") or {}).items()
        if name not in said
    ]
    ema, held, best = (result.get(name) or {} for name in ("ema", "validation", "best"))
    rows += [
        ("test accuracy, moving average", percent(ema.get("accuracy"))),
        ("test loss, moving average", number(ema.get("loss"), ".4f")),
        ("validation accuracy", percent(held.get("accuracy"))),
        ("validation loss", number(held.get("loss"), ".4f")),
    ]
    if best and held:
        rows.append((f"best {best['by']} on {best['on']} set", f"at step {best['step']:,}"))
    return rows


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value + 0.0 if abs(value) >= 0.005 else 0.0:.2f} s"


def headline(config: dict[str, Any], threads: Any) -> str:
    """Return a run's model, data, strategy, workers and transport in one line."""
    workers = config["workers"]
    codec = f" with {config['codec']}" if config.get("codec", "none") != "none" else ""
    network = f" between hosts ({config['network']})" if config.get("network") else ""
    return (
        f"{config['model']} on {config['data']}: {kept_together(config)}{codec}, {workers}"
        f" worker{'s' if workers != 1 else ''} x {threads} thread{'s' if threads != 1 else ''},"
        f" {config.get('transport', '?')}{network}"
    )
