"""The live page's reader, its curves, its picture, and what its server refuses."""

import json
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.records import run as record_of
from tests.records import write_study

import paceline.watch.server as server_module
from paceline.errors import BadRequest
from paceline.record.following import LONGEST_LINE_BYTES, Lines, Tail
from paceline.record.formats import EVENT, EVENTS, GO_TOGETHER
from paceline.record.plain_step import is_plain_step
from paceline.record.reader import read_events
from paceline.record.shapes import fault
from paceline.watch.curves import MOST_POINTS, Means, Points
from paceline.watch.ranks import RECENT_STEPS
from paceline.watch.run import RunView
from paceline.watch.server import application, listen, need_extra, only_from_here, open_browser
from paceline.watch.state import Watched, existing


def step(number: int, rank: int = 0, session: int = 0, **fields: Any) -> dict[str, Any]:
    """The event of a step that took 0.1 s, 0.02 s of it in an exchange."""
    return {
        "kind": "step", "rank": rank, "session": session, "t": 1000.0 + number, "step": number,
        "epoch": 0, "n": 8, "loss": 1.0 / number, "compute_s": 0.08, "sync_s": 0.02,
        "began": 0.1 * number, "arrived": 0.1 * number + 0.08, "waits": True,
        "train_s": 0.1 * number, "sent": 100, "received": 100, "messages": 2, **fields,
    }  # fmt: skip


def start(rank: int = 0, session: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "start", "rank": rank, "session": session, "t": 1000.0 + session, "host": "here",
        "role": "worker", "from_step": 0, "total_steps": 50, **fields,
    }  # fmt: skip


def write(folder: Path, rank: int, events: list[dict[str, Any]]) -> Path:
    path = folder / "events" / f"worker-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    return path


def looked_at(folder: Path) -> dict[str, Any]:
    view = RunView(folder, folder)
    assert view.refresh(60)
    return view.picture()


# --- the incremental reader

LINES = st.one_of(
    st.integers(1, 99).map(lambda n: json.dumps(step(n)).encode()),
    st.just(json.dumps(start()).encode()),
    st.just(
        json.dumps({"kind": "of a plugin", "rank": 0, "session": 0, "t": 1.0, "é": "ü"}).encode()
    ),
    st.sampled_from([b"", b"  ", b"{", b"[1]", b"null", b"\xff\xfe", b'{"kind": "step"}', b"\0"]),
)


@given(st.lists(LINES, max_size=12), st.booleans(), st.randoms(use_true_random=False))
def test_any_split_of_the_bytes_gives_the_same_events(
    lines: list[bytes], torn: bool, chance: random.Random
) -> None:
    content = b"".join(line + b"\n" for line in lines) + (b'{"kind": "st' if torn else b"")
    at_once = Lines()
    events = at_once.feed(content)
    in_pieces, found, rest = Lines(), [], content
    while rest:
        size = chance.randint(1, min(len(rest), 90))
        found += in_pieces.feed(rest[:size])
        rest = rest[size:]
    assert found == events
    assert in_pieces.damaged == at_once.damaged


@given(st.lists(LINES, max_size=12))
def test_it_reads_what_the_report_reads(tmp_path_factory: Any, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("events") / "worker-0.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    tail, notes = Tail(path), list[str]()
    assert not tail.replaced()
    assert tail.more() == read_events(path, notes)
    assert bool(tail.damaged) == bool(notes)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**19),
    st.floats(),
    st.sampled_from(["step", [], {}]),
)


@given(st.dictionaries(st.sampled_from([*step(1), "encode_s", "staleness"]), VALUES, max_size=3))
def test_the_short_way_of_checking_a_step_accepts_no_more(changed: dict[str, Any]) -> None:
    assert is_plain_step(step(1))
    assert is_plain_step(step(1, loss=None, encode_s=0.1))
    event = {**step(1), **changed}
    if is_plain_step(event):
        assert fault(event, {**EVENT, **EVENTS["step"], **GO_TOGETHER["step"]}) is None


def test_no_byte_is_read_twice_and_a_half_line_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fed = tmp_path / "worker-0.jsonl", bytearray()
    real = Lines.feed
    monkeypatch.setattr(
        Lines, "feed", lambda self, piece: (fed.extend(piece), real(self, piece))[1]
    )
    whole = b"".join(json.dumps(step(n)).encode() + b"\n" for n in (1, 2, 3))
    path.write_bytes(whole[:-20])
    tail = Tail(path)
    assert not tail.replaced()
    assert [e["step"] for e in tail.more()] == [1, 2]
    assert tail.more() == []
    with path.open("ab") as file:
        file.write(whole[-20:])
    assert not tail.replaced()
    assert [e["step"] for e in tail.more()] == [3]
    assert bytes(fed) == whole
    assert tail.damaged == 0
    path.write_bytes(b"")
    assert tail.replaced()


def test_a_line_without_end_is_given_up() -> None:
    lines, piece = Lines(), b"x" * (1 << 20)
    for _ in range(LONGEST_LINE_BYTES // len(piece) + 2):
        assert lines.feed(piece) == []
    assert len(lines._begun) <= LONGEST_LINE_BYTES
    found = lines.feed(b"\n" + json.dumps(step(1)).encode() + b"\n")
    assert [e["step"] for e in found] == [1]
    assert lines.damaged == 1


# --- curves


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=60), st.integers(1, 3000))
def test_curves_stay_small_and_keep_the_mean(some: list[int], more: int) -> None:
    curve, steps = Means(), [*some, *range(1, more)]
    for number in steps:
        curve.add(number, 0.1 * number, float(number), 2.0)
    points = curve.points()
    assert 0 < len(points) <= MOST_POINTS
    assert [p[0] for p in points] == sorted({p[0] for p in points})
    assert points[-1][0] == max(steps)
    weights = [bin[0] for _, bin in sorted(curve._bins.items())]
    mean = sum(w * p[2] for w, p in zip(weights, points, strict=True)) / sum(weights)
    assert mean == pytest.approx(sum(steps) / len(steps))


def test_points_keep_the_last_one_and_forget_what_was_undone() -> None:
    points = Points()
    for number in range(1, 2000):
        points.add(number, float(number), 0.5)
    assert len(points.points()) <= MOST_POINTS
    assert points.points()[-1][0] == 1999
    points.cut(1000)
    assert 900 < points.points()[-1][0] <= 1000


# --- the picture


def test_what_a_worker_did_in_its_last_steps(tmp_path: Path) -> None:
    """Worker 1 computes for twice as long, and worker 0 waits for it."""
    slow = {"compute_s": 0.16, "sync_s": 0.04}
    for rank in (0, 1):
        write(tmp_path, rank, [start(rank)])
    for n in range(1, 21):
        write(
            tmp_path,
            0,
            [step(n, began=0.2 * n, arrived=0.2 * n + 0.08, sync_s=0.12, train_s=0.2 * n)],
        )
        write(
            tmp_path,
            1,
            [step(n, 1, began=0.2 * n, arrived=0.2 * n + 0.16, train_s=0.2 * n, **slow)],
        )
    picture = looked_at(tmp_path)
    first, second = picture["ranks"]
    assert first["shares"] == pytest.approx(
        {"compute": 0.4, "codec": 0, "exchange": 0.2, "idle": 0.4}
    )
    assert second["shares"] == pytest.approx(
        {"compute": 0.8, "codec": 0, "exchange": 0.2, "idle": 0}
    )
    assert first["speed"] / second["speed"] == pytest.approx(2.0, rel=1e-3)
    assert (first["sent_bytes"], first["step"], picture["phase"]) == (2000, 20, "training")
    assert (picture["left_steps"], picture["left_s"]) == (30, pytest.approx(6.0))
    assert picture["samples_per_s"] == pytest.approx(80.0)


def test_a_resume_undoes_later_steps(tmp_path: Path) -> None:
    evaluation = {
        "kind": "evaluation",
        "loss": 1.0,
        "accuracy": 0.5,
        "metric": None,
        "t": 1.0,
        "rank": 0,
    }
    for rank in (0, 1):
        write(tmp_path, rank, [start(rank), *(step(n, rank) for n in range(1, 31))])
        if rank == 0:
            write(tmp_path, 0, [{**evaluation, "session": 0, "step": 30, "train_s": 3.0}])
        write(tmp_path, rank, [start(rank, 1, from_step=20), step(21, rank, 1), step(22, rank, 1)])
    picture = looked_at(tmp_path)
    assert [p[0] for p in picture["curves"]["loss"]] == list(range(1, 23))
    assert picture["curves"]["metric"] == []
    assert picture["step"] == 22


def test_another_run_in_the_same_folder(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [start(), *(step(n) for n in range(1, 10))])
    view = RunView(tmp_path, tmp_path)
    assert view.refresh(60)
    path.unlink()
    write(tmp_path, 0, [start(), step(1)])
    assert view.refresh(60)
    assert view.picture()["step"] == 1


def test_damaged_lines_and_files_are_left_out_and_told(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [start(), step(1)])
    with path.open("ab") as file:
        file.write(b'{"kind": "step"}\n\xff\xfe\n{"half')
    (tmp_path / "config.json").write_text("[")
    (tmp_path / "run.json").write_text('{"schema": 1}')
    (tmp_path / "events" / "worker-1.jsonl").mkdir()
    os.mkfifo(tmp_path / "events" / "worker-2.jsonl")
    picture = looked_at(tmp_path)
    assert picture["step"] == 1
    assert picture["faults"] == [
        "events/worker-0.jsonl: 2 damaged lines left out", "config.json cannot be read",
        "run.json cannot be read",
    ]  # fmt: skip


def test_the_metric_that_was_asked_for(tmp_path: Path) -> None:
    metric = {"name": "f1", "value": 0.25, "higher_is_better": True}
    event = {"kind": "evaluation", "rank": 0, "session": 0, "t": 1.0, "step": 1, "train_s": 0.1}
    write(
        tmp_path, 0, [start(), step(1), {**event, "loss": 1.0, "accuracy": 0.9, "metric": metric}]
    )
    picture = looked_at(tmp_path)
    assert picture["metric"]["name"] == "f1"
    assert picture["curves"]["metric"] == [[1, 0.1, 0.25]]


@pytest.mark.parametrize(("transport", "sent"), [("gloo", 70), ("shm", None)])
def test_a_server_before_and_after_its_end(
    tmp_path: Path, transport: str, sent: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"workers": 1, "transport": transport}))
    of = {"rank": 1, "session": 0, "t": 1001.0}
    sample = {**of, "kind": "sample", "cpu_system_s": 0.0, "rss_bytes": 5, "net_sent_bytes": 70}
    write(tmp_path, 0, [start(), step(1)])
    write(tmp_path, 1, [start(1, role="server"), {**sample, "elapsed_s": 1.0, "cpu_user_s": 1.0},
                        {**sample, "elapsed_s": 3.0, "cpu_user_s": 2.0}])  # fmt: skip
    server = looked_at(tmp_path)["ranks"][1]
    assert (server["sent_bytes"], server["cpu_percent"], server["shares"]) == (sent, 50.0, None)
    write(tmp_path, 1, [{**of, "kind": "summary", "served_sent_bytes": 900, "cpu_percent": 7.0}])
    server = looked_at(tmp_path)["ranks"][1]
    assert (server["role"], server["sent_bytes"], server["cpu_percent"]) == ("server", 900, 7.0)


def test_sixteen_workers_and_many_steps_stay_small(tmp_path: Path) -> None:
    """The picture has a fixed size, the memory too, and one refresh has a limit of time."""
    for rank in range(16):
        write(tmp_path, rank, [start(rank), *(step(n, rank) for n in range(1, 1500))])
    view = RunView(tmp_path, tmp_path)
    assert not view.refresh(0.0), "a refresh has a limit of time"
    behind = view.picture()
    assert 0 < behind["reading"] < 1
    while not view.refresh(0.0):
        pass
    picture = view.picture()
    assert picture["reading"] is None
    assert (picture["step"], len(picture["ranks"])) == (1499, 16)
    assert len(json.dumps(picture)) < 60_000
    assert all(len(rank.recent) <= RECENT_STEPS for rank in view.ranks.values())


# --- a study


def test_a_study_tells_what_is_done_and_left(tmp_path: Path) -> None:
    runs = [record_of("serial", 1, 4.0), record_of("psgd", 2, 2.0), record_of("psgd", 2, 3.0)]
    folder = write_study(tmp_path / "s", runs, events=True)
    about = json.loads((folder / "study.json").read_text())
    about["runs"].append({**about["runs"][0], "name": "later", "seed": 7})
    (folder / "study.json").write_text(json.dumps(about))
    picture = Watched(folder).picture()["study"]
    assert (picture["done"], picture["planned"], picture["over"]) == (3, 4, False)
    serial, psgd = picture["rows"]
    assert [run["status"] for run in serial["runs"]] == ["completed", "planned"]
    assert psgd["train_s"] == pytest.approx(2.5)
    wall_s = json.loads(next((folder / "runs").glob("serial*/run.json")).read_text())["result"][
        "wall_s"
    ]
    assert picture["left_s"] == pytest.approx(wall_s, rel=1e-4)


def test_the_notices_of_a_study_are_told(tmp_path: Path) -> None:
    said = {"t": 1_700_000_123.4, "text": "2 of 3 seeds were run"}
    folder = write_study(tmp_path / "s", [record_of("serial", 1, 4.0)], notices=[said])
    assert Watched(folder).picture()["study"]["notices"] == [{**said, "t": 1_700_000_123}]
    damaged = write_study(tmp_path / "d", [record_of("serial", 1, 4.0)], notices=["soon"])
    assert Watched(damaged).picture()["study"]["faults"]


def test_blocks_that_confirm(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", [record_of("serial", 1, 4.0)], events=True)
    about = json.loads((folder / "study.json").read_text())
    block = {
        "number": 0, "order": ["serial x 1", "psgd x 2"], "seconds": 10.0, "foreign": None,
        "stolen": None, "repeats": 0, "disturbed": False,
        "samples_per_s": {"serial x 1": 500.0, "psgd x 2": 900.0},
    }  # fmt: skip
    about["confirm"] = {
        "serial": "serial x 1", "settings": ["psgd x 2"], "width": 0.1, "ended": "interrupted",
        "blocks": [block, block], "wanted": 5, "block_s": 10.0,
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(about))
    write(folder / "confirm" / "block-003" / "psgd-2", 0, [start(), step(1)])
    picture = Watched(folder).picture()
    assert picture["study"]["confirm"] == {"blocks": 2, "wanted": 5, "left_s": 30.0}
    assert (picture["study"]["current"], picture["run"]["step"]) == ("psgd-2", 1)


def test_nothing_outside_the_folder_is_read(tmp_path: Path) -> None:
    secret = tmp_path / "elsewhere"
    write(secret, 0, [start(), step(1)])
    (secret / "config.json").write_text('{"model": "secret"}')
    folder = write_study(tmp_path / "s", [record_of("serial", 1, 4.0)], events=True)
    (folder / "runs" / "link").symlink_to(secret)
    watched = Watched(folder)
    own = watched.picture()["run"]["name"]
    for name in ("link", "../../elsewhere", str(secret), "..", "", "nosuch"):
        picture = watched.picture(name)
        assert picture["run"]["name"] == own
        assert "secret" not in json.dumps(picture["run"])
    run = tmp_path / "run"
    (run / "events").mkdir(parents=True)
    (run / "events" / "worker-0.jsonl").symlink_to(secret / "events" / "worker-0.jsonl")
    (run / "config.json").symlink_to(secret / "config.json")
    picture = looked_at(run)
    assert (picture["ranks"], picture["title"]) == ([], "A run")


def test_a_folder_in_which_nothing_has_begun(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.picture() == {"folder": str(tmp_path), "study": None, "run": None}
    write(tmp_path, 0, [start(), step(1)])
    assert watched.picture()["run"]["phase"] == "training"


# --- the server


def requested(path: str, host: bytes, app: Any) -> tuple[int, dict[str, str], bytes]:
    """Ask the application without a network."""
    import asyncio

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:  # the client stays and says nothing
        await asyncio.Event().wait()
        return {}

    route, _, query = path.partition("?")
    scope = {
        "type": "http", "method": "GET", "path": route, "raw_path": route.encode(), "headers":
        [(b"host", host)], "query_string": query.encode(), "scheme": "http", "root_path": "",
        "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "http_version": "1.1",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    heads = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return sent[0]["status"], heads, b"".join(m.get("body", b"") for m in sent[1:])


def test_only_this_machine_is_answered(tmp_path: Path) -> None:
    write(tmp_path, 0, [start(), step(1)])
    app = only_from_here(application(Watched(tmp_path), lambda: True))
    for host in (b"127.0.0.1:8000", b"localhost:9", b"LOCALHOST", b"[::1]:80"):
        status, heads, body = requested("/state.json", host, app)
        assert (status, json.loads(body)["run"]["step"]) == (200, 1)
        assert "default-src 'none'" in heads["content-security-policy"]
    for host in (
        b"evil.example",
        b"evil.example:8000",
        b"127.0.0.1.evil.example",
        b"",
        b"localhost.:1",
    ):
        status, _, body = requested("/state.json", host, app)
        assert (status, body) == (403, b"This page answers to 127.0.0.1 only.\n")
    for path in ("/events/worker-0.jsonl", "/../config.json", "/page/watch.js", "/%2e%2e/run.json"):
        assert requested(path, b"localhost", app)[0] == 404
    status, heads, body = requested("/stream?run=..", b"localhost", app)
    assert heads["content-type"].startswith("text/event-stream")
    assert json.loads(body.removeprefix(b"data: "))["closing"] is True
    for path in ("/", "/watch.css", "/watch.js"):
        status, _, body = requested(path, b"localhost", app)
        assert status == 200
        assert b"//" not in body.replace(b"http://www.w3.org", b"").replace(b"\n//", b"").replace(
            b" // ", b""
        )


def test_folders_and_ports_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadRequest, match=r"^there is no folder nosuch: "):
        existing("nosuch")
    (tmp_path / "file").touch()
    with pytest.raises(BadRequest, match="is a file"):
        existing(str(tmp_path / "file"))
    with pytest.raises(BadRequest, match="is not a path"):
        existing("a\0b")
    with listen(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadRequest, match=rf"^port {port} is in use .* choose another `port`"):
            listen(port)

    def refuse(self: socket.socket, address: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(BadRequest, match=r"^port 80 needs the rights of root: choose another"):
        listen(80)


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "find_spec", lambda name: None)
    with pytest.raises(BadRequest, match=r"starlette and uvicorn: pip install 'paceline\[watch\]'"):
        need_extra()


def test_a_text_browser_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    import webbrowser

    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("w3m"))
    assert not open_browser("http://127.0.0.1:1/")
    graphical = webbrowser.BackgroundBrowser("xdg-open")
    monkeypatch.setattr(graphical, "open", lambda url: opened.append(url) or True)
    monkeypatch.setattr(webbrowser, "get", lambda: graphical)
    assert open_browser("http://127.0.0.1:1/")
    assert opened == ["http://127.0.0.1:1/"]


def test_a_run_that_ended_and_one_that_goes_on_again(tmp_path: Path) -> None:
    record = record_of("serial", 1, 4.0)
    write(tmp_path, 0, [start(), step(1)])
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert looked_at(tmp_path)["status"] == "completed"
    write(tmp_path, 0, [start(0, 1, from_step=1, t=time.time() + 60), step(2, 0, 1)])
    assert looked_at(tmp_path)["status"] is None


def test_a_private_run_hides_its_loss_and_shows_its_epsilon(run_inproc: Any) -> None:
    run = run_inproc(epochs=2, privacy="noise=1.0,clip=0.5,secure=false", progress=False)
    picture = looked_at(run.out)
    assert picture["curves"]["loss"] == []
    assert picture["private"]
    assert picture["epsilon"] == float(f"{run.record['privacy']['epsilon']:.5g}")
    (run.out / "run.json").unlink()
    assert 0 < looked_at(run.out)["epsilon"] <= 1.01 * picture["epsilon"]
