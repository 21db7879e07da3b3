"""What settings used: the table of resources and `workers.csv`, for workers and servers."""

import csv
import re
from pathlib import Path
from typing import Any

from tests.records import run, worker, write_study

from paceline.report.charts.all import all_charts
from paceline.report.charts.base import ChartData
from paceline.report.columns import measured
from paceline.report.page.data_scale import data_scale_section
from paceline.report.page.resources import resources_section
from paceline.report.reading import read_study
from paceline.report.render import render, tables_of
from paceline.report.resources import resource_table, why_no_network

THROUGH_MEMORY = {
    "payload_sent_bytes": 1000,
    "payload_received_bytes": 2000,
    "memory_sent_bytes": 1000,
    "memory_received_bytes": 2000,
}
OVER_NETWORK = {
    "payload_sent_bytes": 1000,
    "payload_received_bytes": 2000,
    "net_sent_bytes": 1100,
    "net_received_bytes": 2100,
}


def served(each: dict[str, Any], seconds: float | None = 1.5, **server: Any) -> dict[str, Any]:
    """A run of `ps` with two workers and one server."""
    record = run("ps", 2, 2.0, 0.9, each=[each, each], reached_s=seconds, target=0.8)
    own = {"samples": 0, "steps": 0, "role": "server", **server}
    return {**record, "workers": [*record["workers"], worker(2, **own)]}


def test_servers_have_rows_of_their_own(tmp_path: Path) -> None:
    busy = {
        "cpu_percent": 30.0,
        "payload_sent_bytes": 4000,
        "rss_peak_bytes": 7,
        "net_sent_bytes": 5,
    }
    runs = [run(target=0.8), served(OVER_NETWORK, **busy), served(OVER_NETWORK, None, **busy)]
    study = read_study(write_study(tmp_path, runs))
    serial, workers, server = resource_table(study)
    assert (serial["setting"], serial["role"], serial["net_sent_bytes"]) == ("serial", "worker", 0)
    assert (workers["role"], workers["ranks"], workers["runs"]) == ("worker", 2, 2)
    assert (workers["net_received_bytes"], workers["net_sent_bytes"]) == (2100, 1100)
    assert workers["cpu_percent"] == 99.0
    assert (server["role"], server["ranks"], server["cpu_percent"]) == ("server", 1, 30.0)
    assert (server["rss_peak_bytes"], server["net_sent_bytes"]) == (7, 5)
    assert workers["accuracy"] == 0.9
    assert (workers["reached"], workers["time_to_accuracy_s"]) == (1, None)
    page = resources_section(study)
    assert "<td>1 server</td><td>30%</td>" in page
    assert "in 1 of 2 runs" in page
    assert "not reached" in page  # serial
    assert "shared memory, so" not in page


def test_bytes_per_step_count_what_servers_send(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, [served(OVER_NETWORK, payload_sent_bytes=4000)]))
    found = measured(study, study.lines[0])
    assert found["sent_bytes"].mean == (1000 + 1000 + 4000) / 20  # 2 workers of 10 steps
    assert found["net_sent_bytes"].mean == 2200 / 20
    assert found["cpu_s"].mean == 3.0
    assert found["server_cpu_percent"].mean == 99.0
    page = render(tmp_path, figures=False).read_text()
    assert "bytes per worker<br>and step,<br>servers included" in page
    assert "bytes per worker and step, servers included" in page
    assert "servers are not included" not in page


def test_an_unknown_number_of_a_server_makes_the_sum_unknown(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, [served(OVER_NETWORK, payload_sent_bytes=None)]))
    found = measured(study, study.lines[0])
    assert found["sent_bytes"] is None
    assert found["net_sent_bytes"] is not None


def test_the_page_says_why_nothing_passed_the_network(tmp_path: Path) -> None:
    quiet = run("allreduce", 2, each=[THROUGH_MEMORY] * 2)
    traces = served({**THROUGH_MEMORY, "net_sent_bytes": 0}, net_sent_bytes=1)
    loud = run("gossip", 2, each=[OVER_NETWORK] * 2)
    silent = run("hogwild", 2)
    said = {}
    for name, runs in {
        "all": [run(), quiet, silent],
        "traces": [run(), traces],
        "some": [run(), quiet, loud],
        "none": [run(), loud],
        "alone": [run()],
    }.items():
        study = read_study(write_study(tmp_path / name, runs))
        said[name] = why_no_network(study), resources_section(study)
    assert said["all"][0] == (
        "The workers exchanged through shared memory, so nothing passed the network: see"
        " `through memory`."
    )
    assert "so hardly anything passed" in said["traces"][0]
    assert said["some"][0].startswith("The workers of `allreduce x 2` exchanged through")
    assert said["none"][0] == said["alone"][0] == ""
    assert "<code>hogwild x 2</code> sent no message during the steps" in said["all"][1]
    assert "sent no message" not in said["none"][1]
    assert "nothing passed the network" in render(tmp_path / "all", figures=False).read_text()


def test_a_legend_has_only_the_parts_that_are_there(tmp_path: Path) -> None:
    """user.md, task 7: "codec" and "computing and exchange" stood in the legend of runs without."""
    study = read_study(write_study(tmp_path, [run(), served(OVER_NETWORK)]))
    charts = {chart.name: chart for chart in all_charts(ChartData(study, tables_of(study)))}
    for name in ("time_per_step", "time_per_worker"):
        legends = re.findall(r"'domain': (\[[^]]*\])", str(charts[name].spec))
        assert legends, name
        assert not any("codec" in each or "not separated" in each for each in legends), name
        assert any("compute" in each for each in legends), name


def test_workers_csv_has_every_rank_of_every_run(tmp_path: Path) -> None:
    failed = run("psgd", 2, error="a worker died")
    unknown = run("gossip", 2, each=[{"net_sent_bytes": None}, {"net_sent_bytes": 3}])
    write_study(tmp_path, [run(), served(OVER_NETWORK, cpu_percent=12.5), unknown, failed])
    render(tmp_path, figures=False)
    with (tmp_path / "workers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["label"], r["role"], r["rank"]) for r in rows] == [
        ("serial", "worker", "0"),
        ("ps", "worker", "0"),
        ("ps", "worker", "1"),
        ("ps", "server", "2"),
        ("gossip", "worker", "0"),
        ("gossip", "worker", "1"),
    ]
    server = rows[3]
    assert (server["cpu_percent"], server["workers"], server["seed"]) == ("12.5", "2", "0")
    assert (server["train_s"], server["time_to_accuracy_s"]) == ("2.0", "1.5")
    assert (server["test_accuracy"], server["metric"]) == ("0.9", "")
    assert [r["net_sent_bytes"] for r in rows[4:]] == ["", "3"]


def of_size(strategy: str, workers: int, share: float, power: float) -> dict[str, Any]:
    """A run on a share of 8,000 samples whose CPU time is 10 share^power."""
    cpu = 10 * share**power / workers
    each = [{"cpu_user_s": 0.75 * cpu, "cpu_system_s": 0.25 * cpu}] * workers
    varied = {"data_share": share}
    samples = int(8000 * share)
    return run(strategy, workers, 4 * share, samples=samples, each=each, varied=varied)


def test_time_against_the_size_of_the_data(tmp_path: Path) -> None:
    runs = [
        of_size(strategy, workers, share, power)
        for strategy, workers, power in (("serial", 1, 1.0), ("allreduce", 2, 0.5))
        for share in (0.25, 0.5, 1.0)
    ]
    study = read_study(write_study(tmp_path, runs))
    page = data_scale_section(study)
    assert "<td>8,000</td><td>5.00 s</td><td>4.00 s</td><td>10.00 s</td><td>2.50 s</td>" in page
    powers = re.findall("<td>power</td>(.*?)</tr>", page)
    assert [re.findall(r"[\d.]+", row)[1:] for row in powers] == [
        ["1.00", "1.00", "1.00"],
        ["1.00", "0.50", "0.50"],
    ]
    names = {chart.name for chart in all_charts(ChartData(study, tables_of(study)))}
    assert names >= {f"{key}_by_data_share" for key in ("wall_s", "cpu_s", "cpu_system_s")}
    assert data_scale_section(read_study(write_study(tmp_path / "none", [run()]))) == ""


def test_profiled_settings_are_not_compared(tmp_path: Path) -> None:
    """The profiler slows serial more here: without care allreduce would be called 10x as fast."""
    profiled = {"varied": {"profile": "True"}}
    runs = [run(), run("allreduce", 2, 1.9), run("serial", 1, 20.0, **profiled)]
    study = read_study(write_study(tmp_path / "a", [*runs, run("allreduce", 2, 2.0, **profiled)]))
    assert [line.label for line in study.lines] == ["serial", "allreduce"]
    assert [line.train_s.mean for line in study.profiled] == [20.0, 2.0]
    render(tmp_path / "a", figures=False)
    with (tmp_path / "a" / "workers.csv").open() as file:
        assert sum("profile=True" in row["label"] for row in csv.DictReader(file)) == 3
    alone = read_study(write_study(tmp_path / "b", [run("serial", 1, 20.0, **profiled)]))
    assert (len(alone.lines), alone.profiled) == (1, [])
