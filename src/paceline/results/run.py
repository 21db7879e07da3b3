"""`Run`: a finished run, its record and its model with the trained weights."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import nn

from paceline.common.extras import need
from paceline.errors import BadRequest
from paceline.record import checkpoint
from paceline.record.reader import read_run
from paceline.report.notebook import framed, html_table
from paceline.report.render import render
from paceline.report.run_rows import headline, number, result_rows, seconds
from paceline.report.words import size
from paceline.request.naming import kept_together
from paceline.results import history, plot
from paceline.results.evaluate import evaluate
from paceline.results.model import Make, filled, make_model, saved_model

Which = Literal["last", "best", "ema"]


class Run:
    """A finished run: its record, and its model with the trained weights.

        run = paceline.load("runs/a")
        run.test_accuracy, run.samples_per_s, run.model
        run.history, run.frame(), run.plot(), run.workers, run.report()

    Every entry of the record's `result` is an attribute.
    """

    def __init__(self, record: dict[str, Any], out: Path, make_model: Make | None = None) -> None:
        self.record, self.out, self._make_model = record, out, make_model
        self.ray: Any = None  # the result of Ray Train, after paceline.ray_train

    @classmethod
    def open(cls, folder: str | Path, model: Any = None) -> Run:
        """Read a run from its folder.

        `model`: a name, a Module, a class or a function, where the record does not say how to build
        it. Nothing in the folder is run.
        """
        record, out = read_run(folder), Path(folder)
        return cls(record, out, make_model(model, record) if model is not None else None)

    # --- the weights

    @property
    def model(self) -> nn.Module:
        """The trained model (the strategy's consensus weights), on the CPU, in evaluation mode."""
        return self._with(self.weights)

    @property
    def weights(self) -> dict[str, Any]:
        """The trained weights, as the plain model's state dict."""
        return self._weights("last")

    def _weights(self, which: str) -> dict[str, Any]:
        if which not in ("last", "best", "ema"):
            raise BadRequest(f"which={which}: it must be last, best or ema")
        path, why = self.out / "model.safetensors", f"the run was {self.record['status']}"
        best = (self.record["result"].get("best") or {}).get("step")
        if which == "best" and best != self.record["result"]["steps"]:
            # the last weights are not the best: those are in a checkpoint, if it was kept
            kept = checkpoint.best_of(self.out / "checkpoints")
            why = "a run keeps the best checkpoint with --keep best"
            path = (kept or self.out / "checkpoints" / checkpoint.BEST) / path.name
        elif which == "ema":
            path, why = self.out / "model-ema.safetensors", "a run writes it with --ema 0.999"
        if not path.is_file():
            raise BadRequest(f"{self.out} has no {path.relative_to(self.out)}: {why}")
        return checkpoint.load_weights(path)

    def _with(self, weights: dict[str, Any]) -> nn.Module:
        make = self._make_model or saved_model(self.record, self.out)
        return filled(make(), weights, self.out)

    def evaluate(
        self,
        data: Any = None,
        *,
        metric: Any = None,
        loss: Any = None,
        step: Any = None,
        which: Which = "last",
        data_dir: str | None = None,
    ) -> dict[str, Any]:
        """Return the loss and the metrics of the saved weights on the test set of `data`.

        `data` is anything that `train` takes (default: the data of the run); `metric` and `loss`
        are those of the run unless others are given; `which`: the weights at the end (last), of the
        best evaluation (best), or their moving average (ema); `step`: the training step of your own
        that the run had, if any.
        """
        given = data if data is not None else self.record["config"].get("data")
        if data is None and "<" in str(given):
            raise BadRequest(f"the run's data was given in Python ({given}): give --data")
        model = self._with(self._weights(which))
        return evaluate(
            model, self.record, given, data_dir=data_dir, metric=metric, loss=loss, step=step
        )

    # --- its course

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """One dict per step and per evaluation of the whole run, in order.

        Steps have `loss` (the mean over all workers' samples), evaluations `test_loss`,
        `test_accuracy` and every metric, or the same of the validation set (`validation_loss`).
        Steps that a resume has undone are left out.
        """
        return history.history(self.out)

    @property
    def notices(self) -> list[str]:
        """What the run told its user."""
        return history.notices(self.out)

    def frame(self) -> Any:
        """Return the history as a pandas DataFrame: a row per step and per evaluation."""
        pandas = need("pandas", "pandas", "notebook", "run.frame()")
        return pandas.DataFrame(self.history)

    def plot(self) -> Any:
        """Draw the loss and the metric over the steps; return matplotlib's Figure."""
        metric = self.record["result"]["metric"]
        config = self.record["config"]
        title = (
            f"{config['model']} on {config['data']}: {kept_together(config)} x {config['workers']}"
        )
        return plot.plot(self.history, title, metric["name"] if metric else "accuracy")

    @property
    def workers(self) -> list[dict[str, Any]]:
        """One dict per worker and server: seconds of computing, exchange and waiting, bytes, CPU,
        memory (docs/records.md lists the fields).
        """
        return [dict(worker) for worker in self.record["workers"]]

    def report(self, figures: bool = True) -> Path:
        """Write the report into the run's folder; return the path of its page."""
        return render(self.out, figures)

    # --- how it shows itself

    def __getattr__(self, name: str) -> Any:
        """Return an entry of the record's `result`: `run.test_accuracy`, `run.samples_per_s`."""
        if name.startswith("_") or name == "record":
            raise AttributeError(name)
        result = self.record["result"]
        if name in result:
            return result[name]
        raise AttributeError(f"a run has no {name!r}; its results are {', '.join(result)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.record["result"]]

    def __repr__(self) -> str:
        r, c = self.record["result"], self.record["config"]
        accuracy = "" if r["test_accuracy"] is None else f", accuracy {r['test_accuracy']:.4f}"
        rate = "" if r["samples_per_s"] is None else f", {r['samples_per_s']:,.0f} samples/s"
        ended = "" if self.record["status"] == "completed" else f", {self.record['status']}"
        return (
            f"<Run {kept_together(c)} x {c['workers']}: {r['steps']} steps{accuracy}{rate}{ended},"
            f" in {self.out}>"
        )

    def _repr_html_(self) -> str:
        """Show the results in a notebook, and with several ranks a row for each."""
        parts = [html_table([], [list(row) for row in result_rows(self.record)])]
        ranks = self.record["workers"]
        if len(ranks) > 1:
            head = ["worker", "compute", "sync", "idle", "sent", "CPU", "peak memory"]
            parts.append(html_table(head, [_rank_row(rank) for rank in ranks]))
        if self.record["error"]:
            parts.append(html_table([], [[self.record["status"], self.record["error"]]]))
        config = self.record["config"]
        return framed(headline(config, config.get("threads")), parts, str(self.out))


def _rank_row(rank: dict[str, Any]) -> list[str]:
    """Return the cells of one rank. A server's seconds are not those of training."""
    serves = rank["role"] == "server"
    times = ["" if serves else seconds(rank[f"{part}_s"]) for part in ("compute", "sync", "idle")]
    cpu = number(rank["cpu_percent"], ".0f")
    return [
        f"server {rank['rank']}" if serves else str(rank["rank"]),
        *times,
        size(rank["payload_sent_bytes"]),
        cpu if cpu == "-" else f"{cpu}%",
        size(rank["rss_peak_bytes"]),
    ]
