"""Runs of MLflow: `mlflow ui --backend-store-uri sqlite:///OUT/mlflow.db`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

from paceline.callbacks import scalars
from paceline.callbacks.base import Callback, Event, RunInfo, need
from paceline.registry import callbacks

FLUSH_S = 1.0  # metrics are sent together: a server answers a request in milliseconds
MOST_METRICS = 1000  # of one request, by MLflow's interface
LONGEST_PARAM = 500
STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


@callbacks.register("mlflow")
@dataclass(repr=False)
class MLflow(Callback):
    """Logs to MLflow: to MLFLOW_TRACKING_URI if that is set, else into mlflow.db in the run's
    folder.
    """

    uri: Annotated[str, "the tracking URI, instead of MLFLOW_TRACKING_URI"] = ""
    experiment: Annotated[str, "the name of the experiment"] = "paceline"

    def __post_init__(self) -> None:
        for module in ("mlflow", "sqlalchemy", "alembic"):  # the last two: for a local database
            need(module, "mlflow", "mlflow")

    def on_start(self, run: RunInfo) -> None:
        """Begin a run of MLflow, with the options as parameters."""
        import mlflow
        from mlflow.entities import Param, RunTag

        out = run.out.resolve()
        given = self.uri or (mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else "")
        self._client: Any = mlflow.MlflowClient(given or f"sqlite:///{out / 'mlflow.db'}")
        found = self._client.get_experiment_by_name(self.experiment)
        # A local store keeps its artifacts beside it, a server where it was told to.
        place = None if given else (out / "mlruns").as_uri()
        number = (
            found.experiment_id
            if found is not None
            else self._client.create_experiment(self.experiment, artifact_location=place)
        )
        self._run_id = self._client.create_run(number, run_name=out.name).info.run_id
        self._waiting: list[Any] = []
        self._sent_at = time.monotonic()
        params = [
            Param(name, str(value)[:LONGEST_PARAM])
            for name, value in run.config.items()
            if value is not None
        ]
        tags = [RunTag("paceline.out", str(out)), RunTag("paceline.from_step", str(run.from_step))]
        self._client.log_batch(self._run_id, params=params, tags=tags)

    def on_step(self, event: Event) -> None:
        """Log the numbers of a step."""
        self._log(event["step"], event["t"], scalars.of_step(event))

    def on_evaluation(self, event: Event) -> None:
        """Log the numbers of an evaluation."""
        self._log(event["step"], event["t"], scalars.of_evaluation(event))

    def on_end(self, run: RunInfo) -> None:
        """End the run of MLflow with the status of the record."""
        record = run.record or {}
        numbers = scalars.of_record(record)
        self._log(int(numbers.get("run/steps", 0)), time.time(), numbers)
        self._flush()
        self._client.set_terminated(self._run_id, STATUS[record["status"]])

    def _log(self, step: int, t: float, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric

        at_ms = int(1000 * t)
        self._waiting += [Metric(name, value, at_ms, step) for name, value in numbers.items()]
        if len(self._waiting) >= MOST_METRICS // 2 or time.monotonic() - self._sent_at > FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        self._sent_at = time.monotonic()
        while self._waiting:
            self._client.log_batch(self._run_id, metrics=self._waiting[:MOST_METRICS])
            del self._waiting[:MOST_METRICS]
