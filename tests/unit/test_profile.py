"""Profiles as data: lines, distributions, batch sizes between those measured, the file."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.records import run as made_up
from tests.small import make_pairs

from paceline.errors import BadRequest, RunFailed
from paceline.planning.compute import Compute, Steps
from paceline.planning.fit import QUANTILES, Line, error_of, fit_line, median, quantiles
from paceline.planning.from_run import profile_of_run
from paceline.planning.measure import whole
from paceline.planning.measure.codecs import measure_codecs
from paceline.planning.measure.compute import Loop, Measured, fitting, measure_steps, summarise
from paceline.planning.measure.links import Times, link_cost
from paceline.planning.measurements import Row, read_rows
from paceline.planning.profile import (
    CodecCost,
    LinkCost,
    Made,
    Memory,
    Model,
    Profile,
    TensorShape,
    portable,
)
from paceline.planning.stored import read_profile, refuse_place, text_of, write_profile
from paceline.registry import codecs
from paceline.replica.buckets import cut
from paceline.request.config import Config
from paceline.request.prepare import prepare
from paceline.request.session import Session
from paceline.run.rank import Rank
from paceline.transport.alone import Alone

seconds = st.floats(1e-6, 1e2)


def steps(batch_size: int, median_s: float, spread: float = 0.1, **parts: float) -> Steps:
    """Return steps whose quantiles rise evenly round the median."""
    shape = [1 + spread * (n / (QUANTILES - 1) - 0.5) for n in range(QUANTILES)]
    return Steps(batch_size, tuple(median_s * s for s in shape), 100, **parts)


def profile(**changes: Any) -> Profile:
    tensors = (TensorShape("0.weight", (300, 1000)), TensorShape("0.bias", (300,)))
    small = Steps(16, steps(16, 0.004).quantiles_s, 90, 0.0039, 0.0001, 0.001, 0.0025, 0.0004)
    made = Profile(
        source="measured",
        model=Model("mlp", 300_300, 4, tensors),
        data="mnist",
        made=Made("2026-11-18T09:00:00+00:00", {"cpu": "x", "cores": 2}, {"torch": "2"}),
        compute=Compute((small, steps(64, 0.01)), 1, (1.01, 0.99), 1.1, 0.99, (0.75, 0.25)),
        codecs=(CodecCost("fp16", "hop", 600_600, Line(1e-6, 1e-10), Line(2e-6, 0.0)),),
        memory=Memory(123_456_789, 64),
        links=(LinkCost("shm", 1e-6, 1e-10, 3e-11, 0.0, 1e-10, 0.0, 2e-10, ((1024, 2e-6),)),),
        measurements=(Row(4, 2, 64, 0.02),),
        missing=("Nothing.",),
    )
    return replace(made, **changes)


# --- lines and quantiles


@given(
    st.floats(0, 1e-2),
    st.floats(1e-12, 1e-6),
    st.lists(st.integers(1, 10**7), min_size=2, max_size=8, unique=True),
)
def test_a_fit_of_an_exact_line_returns_it(fixed: float, slope: float, sizes: list[int]) -> None:
    line = Line(fixed, slope)
    found = fit_line([(size, line.at(size)) for size in sizes])
    assert all(math.isclose(found.at(size), line.at(size), rel_tol=1e-6) for size in sizes)
    if max(sizes) > 10 * min(sizes) and 0.1 < fixed / (slope * min(sizes)) < 10:
        assert math.isclose(found.fixed, fixed, rel_tol=1e-5)
        assert math.isclose(found.slope, slope, rel_tol=1e-5)


@given(st.lists(st.tuples(st.integers(0, 10**7), seconds), min_size=1, max_size=9))
def test_a_fit_is_never_negative_and_no_other_line_is_better(
    points: list[tuple[float, float]],
) -> None:
    found = fit_line(points)
    assert found.fixed >= 0
    assert found.slope >= 0
    if len({x for x, _ in points}) < 2:
        return
    best = error_of(found, points)
    for other in (
        Line(found.fixed * 1.01, found.slope),
        Line(found.fixed * 0.99, found.slope),
        Line(found.fixed, found.slope * 1.01),
        Line(found.fixed, found.slope * 0.99),
        Line(median([y for _, y in points]), 0.0),
    ):
        assert best <= error_of(other, points) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(
    "points", [[], [(1.0, 0.0)], [(1.0, -1.0)], [(-1.0, 1.0)], [(1.0, math.nan)], [(1.0, math.inf)]]
)
def test_no_line_through_nothing(points: list[tuple[float, float]]) -> None:
    with pytest.raises(BadRequest):
        fit_line(points)


@given(st.lists(seconds, min_size=1, max_size=300))
def test_quantiles_rise_from_the_least_to_the_largest(values: list[float]) -> None:
    found = quantiles(values)
    assert len(found) == QUANTILES
    assert (found[0], found[-1]) == (min(values), max(values))
    assert list(found) == sorted(found)


def test_quantiles_of_a_hundred_and_one_are_the_values_themselves() -> None:
    values = [float(n) for n in range(QUANTILES)]
    assert list(quantiles(values[::-1])) == values
    assert median([1.0, 2.0, 4.0, 8.0]) == 3.0
    with pytest.raises(BadRequest):
        quantiles([])


# --- batch sizes between those measured


def test_a_measured_batch_size_is_as_it_was_measured() -> None:
    compute = Compute((steps(16, 0.004), steps(64, 0.01)))
    assert compute.at(64) == (compute.steps[1], None)


@given(st.integers(17, 255), st.floats(1e-5, 1e-2), st.floats(1e-7, 1e-3))
def test_between_two_batch_sizes_steps_are_on_a_line(size: int, fixed: float, each: float) -> None:
    line = Line(fixed, each)
    compute = Compute((steps(16, line.at(16)), steps(256, line.at(256), forward_s=0.5)))
    found, notice = compute.at(size)
    assert notice is None
    assert found.batch_size == size
    assert math.isclose(found.median_s, line.at(size), rel_tol=1e-9)
    assert math.isclose(found.quantiles_s[-1], 1.05 * line.at(size), rel_tol=1e-9)
    assert found.forward_s is None  # one of the two was not measured
    assert compute.line is not None
    assert math.isclose(compute.line.slope, each, rel_tol=1e-4)


def test_outside_the_measured_batch_sizes() -> None:
    line = Line(0.002, 0.0001)
    compute = Compute((steps(16, line.at(16), backward_s=0.001), steps(64, line.at(64))))
    near, silent = compute.at(128)
    far, told = compute.at(129)
    assert (silent, told is None) == (None, False)
    assert told is not None
    assert "129 is far from the profile's, 16 to 64" in told
    assert math.isclose(near.median_s, line.at(128))
    assert math.isclose(far.median_s, line.at(129))
    below, notice = compute.at(8)
    assert notice is None
    assert math.isclose(below.median_s, line.at(8))
    assert below.backward_s is not None
    assert math.isclose(below.backward_s, 0.001 * line.at(8) / line.at(16))
    assert compute.at(7)[1] is not None


def test_extrapolation_stays_within_reason() -> None:
    """A smaller batch is not slower, and not faster than in proportion."""
    falling = Compute((steps(16, 0.010), steps(64, 0.009)))
    assert math.isclose(falling.at(8)[0].median_s, 0.010)
    assert math.isclose(falling.at(100)[0].median_s, 0.009)
    steep = Compute((steps(16, 0.001), steps(32, 0.100)))
    assert math.isclose(steep.at(8)[0].median_s, 0.0005)


def test_one_batch_size_predicts_no_other() -> None:
    compute = Compute((steps(64, 0.01),))
    assert compute.line is None
    assert compute.at(64)[1] is None
    with pytest.raises(BadRequest, match="one batch size, 64: steps of batch size 32 cannot be"):
        compute.at(32)
    with pytest.raises(BadRequest, match="1 or more"):
        compute.at(0)


# --- the file


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    path, made = tmp_path / "p.json", profile()
    write_profile(made, path)
    found = read_profile(path)
    assert text_of(found) == path.read_text()
    assert found.model == made.model
    assert found.links == made.links
    assert found.codecs == made.codecs
    assert found.measurements == made.measurements
    assert found.compute.at(16)[0].median_s == pytest.approx(0.004)
    write_profile(found, path)
    assert read_profile(path) == found
    refuse_place(path)  # an older profile may be replaced
    assert len(path.read_text()) < 6000


@given(st.lists(seconds, min_size=1, max_size=40), seconds, st.floats(0.5, 2.0))
def test_any_measured_numbers_survive_the_file(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], each: float, speed: float
) -> None:
    path = tmp_path_factory.mktemp("p") / "p.json"
    own = Steps(8, quantiles(values), len(values), load_s=each)
    write_profile(profile(compute=Compute((own,), 1, (speed, 1.0))), path)
    found = read_profile(path).compute
    assert found.steps[0].quantiles_s == pytest.approx(own.quantiles_s, rel=1e-5)
    assert found.steps[0].load_s == pytest.approx(each, rel=1e-5)
    assert found.speeds[0] == pytest.approx(speed, rel=1e-5)


def damaged(change: Any) -> str:
    plain = json.loads(text_of(profile()))
    change(plain)
    return json.dumps(plain)


def put(*place: Any) -> Any:
    """Return a change of one value: the names to it, then what is written there."""

    def change(plain: Any) -> None:
        for name in place[:-2]:
            plain = plain[name]
        plain[place[-2]] = place[-1]

    return change


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not a profile, or damaged"),
        ("{", "not a profile, or damaged"),
        ("[]", "has no schema"),
        ("7", "has no schema"),
        ('{"schema": true}', "has no schema"),
        ('{"schema": 1}', "source is missing"),
        ('{"schema": 2}', "schema 2; this Paceline knows 1: use a newer Paceline"),
        ('{"schema": 0}', "schema 0; this Paceline knows 1: make it again"),
        ('{"schema": 1, "result": {}}', "is the record of a run"),
        (damaged(put("compute", "steps", 0, "quantiles_s", 3, -1.0)), "[3] is -1.0"),
        (damaged(put("compute", "steps", 0, "quantiles_s", 3, math.nan)), "[3] is nan"),
        (damaged(put("compute", "steps", 0, "quantiles_s", 3, math.inf)), "[3] is inf"),
        (damaged(put("compute", "steps", 0, "quantiles_s", 3, 0.0)), "not a number above 0"),
        (damaged(put("compute", "steps", 0, "quantiles_s", [])), "has 0 numbers, not 101"),
        (damaged(put("compute", "steps", 0, "quantiles_s", 50, 9.0)), "does not rise"),
        (damaged(put("compute", "steps", [])), "compute.steps is empty"),
        (damaged(put("compute", "steps", 0, "batch_size", 64)), "order of the batch sizes"),
        (damaged(put("compute", "steps", 0, "batch_size", 0)), "not a whole number above 0"),
        (damaged(put("compute", "speeds", [])), "compute.speeds is empty"),
        (damaged(put("compute", "ready", [0.5])), "1 numbers for 2 tensors"),
        (damaged(put("compute", "ready", [0.5, 1.5])), "a fraction above 1"),
        (damaged(put("links", 0, "latency_s", -1e-6)), "links[0].latency_s is -1e-06"),
        (damaged(put("links", 0, "points", [[1.0]])), "not a pair"),
        (damaged(put("codecs", 0, "encode", "slope", "fast")), "encode.slope is 'fast'"),
        (damaged(put("model", "parameters", 0)), "model.parameters is 0"),
        (damaged(put("memory", "much")), "memory is 'much', not a table"),
        (damaged(lambda plain: plain.pop("links")), "links is missing"),
    ],
)
def test_a_damaged_profile_is_refused_in_one_sentence(
    tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(BadRequest) as refused:
        read_profile(path)
    assert said in str(refused.value)
    assert "p.json" in str(refused.value)


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"does not exist: make it with `paceline profile"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(BadRequest, match="cannot be read"):
        read_profile(tmp_path)
    (tmp_path / "p.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadRequest, match="not a profile, or damaged"):
        read_profile(tmp_path / "p.json")
    with pytest.raises(BadRequest, match="exists and is not a profile"):
        refuse_place(tmp_path / "p.json")
    with pytest.raises(BadRequest, match="is a folder"):
        refuse_place(tmp_path)
    with pytest.raises(BadRequest, match=r"the folder .* does not exist"):
        refuse_place(tmp_path / "none" / "p.json")


def test_names_hold_no_path() -> None:
    assert portable("imagefolder:path=/home/me/photos") == "imagefolder"
    assert portable("mlp:hidden=512x256") == "mlp:hidden=512x256"
    assert portable("mynets:Net") == "mynets:Net"
    assert portable("<function make at 0x7f>") == "own"


# --- what follows from a profile


def test_layout_and_buckets() -> None:
    found = profile()
    assert found.model.trained == 300_300
    assert found.model.gradient_bytes == 1_201_200
    assert found.model.layout.numel == 300_300
    assert codecs.build("powersgd").message_bytes(found.model.layout) < 40_000
    # The last tensor's gradient is ready first; it alone is too small for a bucket.
    assert found.buckets() == [(1_201_200, 0.75)]
    assert found.buckets(least_bytes=1000) == [(1200, 0.25), (1_200_000, 0.75)]
    late_first = replace(found.compute, ready=(0.25, 0.75))
    assert profile(compute=late_first).buckets(1000) == [(1200, 0.75), (1_200_000, 0.75)]
    unknown = profile(compute=replace(found.compute, ready=()))
    assert unknown.buckets(1000) == [(1200, 1.0), (1_200_000, 1.0)]
    assert sum(s.numel for slots in cut(found.model.layout, 4) for s in slots) == 300_300
    assert Model("m", 10, 4).layout.numel == Model("m", 10, 4).trained == 10
    assert found.codec("fp16") is found.codecs[0]
    assert found.codec("sign") is None
    assert found.link("shm") is found.links[0]
    assert found.link("gloo") is None


# --- what is measured becomes what


def test_steady_speed_is_kept_apart_from_noise() -> None:
    """Worker 1 takes twice as long in every step, and both have the same noise."""
    noise = [1.0, 1.1, 0.9, 1.0, 1.3]

    def worker_with(factor: float) -> Measured:
        alone = {
            b: [(0.0, 0.3 * b * factor * n, 0.6 * b * factor * n, 0.1 * b * factor * n)
                for n in noise]
            for b in (8, 32)
        }  # fmt: skip
        together = {b: [tuple(1.5 * part for part in step) for step in alone[b]] for b in alone}
        cpu_s = {b: [0.75 * sum(step) for step in alone[b]] for b in alone}
        return Measured(alone, together, cpu_s, (0.5,))

    found = summarise([worker_with(1.0), worker_with(2.0)])
    assert found.speeds == pytest.approx((4 / 3, 2 / 3))
    assert found.together == pytest.approx(1.5)
    assert found.core_share == pytest.approx(0.75)
    assert found.batch_sizes == (8, 32)
    assert found.steps[0].cpu_s == pytest.approx(0.75 * found.steps[0].median_s)
    own = found.steps[1].quantiles_s
    typical = own[50]
    assert typical / found.speeds[0] == pytest.approx(32.0)
    assert typical / found.speeds[1] == pytest.approx(64.0)
    assert own[0] / typical == pytest.approx(0.9)  # the noise, without the speeds
    assert own[-1] / typical == pytest.approx(1.3)


def test_a_link_is_fitted_from_its_messages_alone() -> None:
    line, sizes = Line(50e-6, 8e-9), (1 << 10, 1 << 17, 1 << 22)
    sender = Times(
        {s: [line.at(s)] * 3 for s in sizes},
        {s: [1e-6 + 2e-10 * s] for s in sizes},
        {s: [3e-6 + 4e-10 * s] for s in sizes},
    )
    receiver = Times({}, {}, {s: [5e-6 + 6e-10 * s] for s in sizes})
    found = link_cost("gloo", [sender, receiver])
    assert found.line.at(0) == pytest.approx(50e-6)
    assert found.s_per_byte == pytest.approx(8e-9)
    assert found.s_per_byte_added == pytest.approx(2e-10)
    assert found.cpu_s_per_message_sent == pytest.approx(3e-6)
    assert found.cpu_s_per_byte_received == pytest.approx(6e-10)
    assert [size for size, _ in found.points] == list(sizes)
    assert found.worst[1] == pytest.approx(0.0, abs=1e-9)
    assert whole._off_the_line(found) is None
    bent = replace(found, points=(*found.points, (1 << 24, 2 * line.at(1 << 24))))
    assert bent.worst == (1 << 24, pytest.approx(-0.5))
    assert whole._off_the_line(replace(bent, points=((1000, 1.0),))) is not None


def test_every_codec_is_measured_on_the_layout() -> None:
    layout = profile().model.layout
    values = torch.randn(layout.numel)
    before = values.clone()
    found, missing = measure_codecs(values, layout, seconds=0.0)
    assert missing == []
    assert [c.name for c in found] == [name for name in codecs.names() if name != "none"]
    for cost in found:
        assert 0 < cost.message_bytes < values.nbytes, cost
        assert cost.encode.at(values.nbytes) > 0
        assert cost.decode.at(values.nbytes) > 0
        assert cost.kind == "hop" or cost.encode.fixed == 0
    assert torch.equal(values, before)


def test_a_codec_that_cannot_encode_these_numbers_is_named() -> None:
    found, missing = measure_codecs(
        torch.full((300_300,), math.nan), profile().model.layout, seconds=0.0
    )
    assert len(found) + len(missing) == len(codecs.names()) - 1
    assert any(said.startswith("Codec fp16 was not measured: codec fp16: the") for said in missing)


# --- from a table


HEADER = "workers,hosts,batch_size,step_s\n"


def table(text: str, header: str = HEADER) -> str:
    Path("steps.csv").write_text(header + text)
    return "steps.csv"


@given(st.floats(1e-4, 1.0), st.floats(1e-6, 1e-2))
def test_a_table_on_a_line_gives_that_line(fixed: float, each: float) -> None:
    rows = [f"1,1,{b},{fixed + each * b!r}\n" for b in (16, 64, 256)]
    found = Profile.from_measurements(table("".join(rows) + "4,2,64,0.5\n"), 1000)
    assert found.compute.line is not None
    for size in (16, 100, 500):
        assert found.compute.at(size)[0].median_s == pytest.approx(fixed + each * size, rel=1e-6)
    assert found.measurements == (Row(4, 2, 64, 0.5),)
    assert found.model.gradient_bytes == 4000
    assert any("the noise from step to step is not known" in said for said in found.missing)


def test_repeated_rows_give_the_noise() -> None:
    path = table("1,1,16,0.9\n1,1,16,1.0\n1,1,16,1.2\n1,1,64,4.0\n")
    own = Profile.from_measurements(path, 10).compute.steps[0]
    assert own.count == 3
    assert own.quantiles_s[0] / own.median_s == pytest.approx(0.9)
    assert own.quantiles_s[-1] / own.median_s == pytest.approx(1.2)


def test_a_table_with_one_batch_size_says_what_can_be_predicted() -> None:
    found = Profile.from_measurements(table("1,1,64,0.2\n2,2,64,0.3\n"), 10)
    said = "one batch size with workers=1, 64: only plans with 64 samples per worker can be"
    assert any(said in sentence for sentence in found.missing)
    assert found.compute.at(64)[0].median_s == pytest.approx(0.2)
    with pytest.raises(BadRequest, match="cannot be predicted"):
        found.compute.at(32)


def test_what_spreadsheets_write_is_read() -> None:
    Path("steps.csv").write_text(
        "\ufeffhosts, step_s ,workers,batch_size,note\r\n1,0.25,1.0,64,slow\r\n\r\n", newline=""
    )
    assert read_rows("steps.csv") == [Row(1, 1, 64, 0.25)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        (HEADER, "has no rows"),
        ("workers,hosts,step_s\n1,1,2\n", "has no column batch_size"),
        (HEADER.replace(",", ";") + "1;1;64;0,2\n", "separated by ';'; use commas"),
        (HEADER + "1,1,64\n", "line 2: 3 values for 4 columns"),
        (HEADER + "0,1,64,0.1\n", "workers=0: a whole number of 1 or more"),
        (HEADER + "1,0,64,0.1\n", "hosts=0"),
        (HEADER + "1,1,0,0.1\n", "batch_size=0"),
        (HEADER + "1,1,6.5,0.1\n", "batch_size=6.5"),
        (HEADER + "1,1,64,0\n", "step_s=0: seconds, more than 0"),
        (HEADER + "1,1,64,-2\n", "step_s=-2"),
        (HEADER + "1,1,64,nan\n", "step_s=nan is not a number"),
        (HEADER + "1,1,64,fast\n", "line 2: step_s='fast' is not a number"),
        (HEADER + "1,1,64,\n", "step_s='' is not a number"),
        (HEADER + "1,2,64,0.1\n", "2 hosts for 1 workers"),
        (HEADER + "2,1,64,0.1\n", "no row with workers=1"),
        (HEADER.strip() + ",hosts\n1,1,64,0.1,1\n", "the column hosts twice"),
    ],
)
def test_a_wrong_table_is_refused_in_one_sentence(content: str, said: str) -> None:
    Path("steps.csv").write_text(content)
    with pytest.raises(BadRequest) as refused:
        Profile.from_measurements("steps.csv", 10)
    assert said in str(refused.value)
    assert "steps.csv" in str(refused.value)


def test_files_that_are_no_tables() -> None:
    with pytest.raises(BadRequest, match="does not exist"):
        read_rows("none.csv")
    Path("folder").mkdir()
    with pytest.raises(BadRequest, match="cannot be read"):
        read_rows("folder")
    Path("bytes.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(BadRequest, match="is not text"):
        read_rows("bytes.csv")
    with pytest.raises(BadRequest, match="the model has 1 or more"):
        Profile.from_measurements(table("1,1,64,0.1\n"), 0)


# --- from a run


def write_run(events: list[list[dict[str, Any]]], **about: Any) -> Path:
    folder = Path("run")
    (folder / "events").mkdir(parents=True)
    record = made_up(workers=len(events), **about)
    record["model"] = {"input_shape": [1, 28, 28], "classes": 10}
    (folder / "run.json").write_text(json.dumps(record))
    for rank, own in enumerate(events):
        lines = [{"rank": rank, "session": 0, "t": 0.0, **event} for event in own]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "events" / f"worker-{rank}.jsonl").write_text(text)
    return folder


def step(number: int, n: int, compute_s: float) -> dict[str, Any]:
    zero = dict.fromkeys(("sync_s", "train_s", "sent", "received", "messages"), 0)
    told = {"step": number, "epoch": 0, "n": n, "loss": 1.0, "compute_s": compute_s}
    return {"kind": "step", **told, **zero}


def steps_of(sizes: dict[int, float], count: int = 30) -> list[dict[str, Any]]:
    """Return a slow start, then `count` steps of each batch size."""
    found = [step(n + 1, next(iter(sizes)), 9.0) for n in range(5)]
    for size, taken in sizes.items():
        found += [step(len(found) + 1, size, taken) for _ in range(count)]
    return found


def test_a_profile_of_a_run() -> None:
    start = {"kind": "start", "role": "worker", "parameters": 22_154}
    workers = [[start, *steps_of({64: 0.1})], [start, *steps_of({64: 0.2}), step(99, 7, 0.01)]]
    found = profile_of_run(write_run(workers, strategy="allreduce", threads=2))
    assert found.source == "record"
    assert found.compute.batch_sizes == (64,)  # the short last batch does not count
    assert found.compute.speeds == pytest.approx((4 / 3, 2 / 3))
    assert found.compute.steps[0].median_s == pytest.approx(0.4 / 3)
    assert found.compute.steps[0].quantiles_s[-1] < 1.0  # without the slow start
    assert found.model.parameters == found.model.trained == 22_154
    assert found.memory == Memory(100_000_000, 64)
    said = " ".join(found.missing)
    assert "The run had one batch size, 64" in said
    assert "2 threads each" in said
    assert "A record does not hold the parts of a step" in said
    write_profile(found, "p.json")
    assert read_profile("p.json").model == found.model


def test_workers_with_different_batches_give_two_batch_sizes() -> None:
    start = {"kind": "start", "role": "worker", "parameters": 5}
    workers = [[start, *steps_of({32: 0.1})], [start, *steps_of({64: 0.2})]]
    found = profile_of_run(write_run(workers, strategy="allreduce", model="mine:Net"))
    assert found.compute.batch_sizes == (32, 64)
    assert found.compute.speeds == pytest.approx((1.0, 1.0))
    assert (found.model.name, found.model.parameters, found.model.tensors) == ("mine:Net", 5, ())


def test_runs_that_tell_nothing_about_steps() -> None:
    with pytest.raises(BadRequest, match=r"is not a run: it has no run\.json"):
        profile_of_run("none")
    start = {"kind": "start", "role": "worker", "parameters": 5}
    folder = write_run([[start, *steps_of({64: 0.1}, count=3)]])
    with pytest.raises(BadRequest, match="no batch size with 10 steps after the first 5"):
        profile_of_run(folder)
    for changes, said in (
        ({"each": [{"sync_s": None}], "strategy": "ddp"}, "exchanges inside the backward"),
        ({"transport": "inproc"}, "take turns"),
    ):
        folder.joinpath("run.json").write_text(json.dumps(made_up(**changes)))
        with pytest.raises(BadRequest, match=said):
            profile_of_run(folder)


# --- measuring, in this process


class PartlyUsed(torch.nn.Module):
    """A model with a parameter that no backward pass reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)
        self.unused = torch.nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_worker_measures_alone(precision: str) -> None:
    options = {"model": PartlyUsed, "data": (make_pairs(60), None), "precision": precision}
    job = prepare(Config.make({**options, "threads": 1}), lambda config: Path("x"))
    transport = Alone()
    rank = Rank.of(
        Session(job, Path("x")), transport, whole.Unrecorded(), lambda kind, content: None
    )
    replica = rank.replica()
    before = [w.clone() for w in replica.weights()]
    shares: list[float] = []
    loop = Loop(job, replica, 0, [4, 16])
    found = measure_steps(loop, [4, 16], transport, 0.01, shares.append)
    assert all(len(found.alone[size]) >= 2 for size in (4, 16))
    assert found.together == {4: [], 16: []}  # there is no other worker
    assert all(min(parts) >= 0 and sum(parts) > 0 for parts in found.alone[16])
    ready = dict(zip([n for n, _ in replica.model.named_parameters()], found.ready, strict=True))
    assert ready["unused"] == 1.0
    assert ready["first.weight"] > ready["second.weight"]
    assert shares[-1] == 1.0
    assert not all(map(torch.equal, before, replica.weights()))  # it has trained


def test_batch_sizes_that_the_data_has_not() -> None:
    options = {"model": PartlyUsed, "data": (make_pairs(60), None), "workers": 2}
    job = prepare(Config.make(options), lambda config: Path("x"))
    assert fitting(job, [64, 8, 30, 8]) == (
        [8, 30], ["Batch size 64 was not measured: there are 30 samples per worker."],
    )  # fmt: skip
    with pytest.raises(BadRequest, match=r"2 workers have 30 of the 60 training samples each"):
        fitting(job, [64])


def test_where_mpi_does_not_start_the_other_links_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = (1 << 10, 1 << 20)
    times = Times(*({s: [1e-5 + 1e-9 * s] for s in sizes} for _ in range(3)))

    def fails(*given: Any) -> Any:
        raise RunFailed("mpirun did not start 2 ranks: no slots")

    def forked(body: Any, *given: Any) -> Any:
        assert body.args[0] == ["shm"]
        return {rank: {"shm": times} for rank in range(2)}, {}

    monkeypatch.setattr(whole, "on_mpi_ranks", fails)
    monkeypatch.setattr(whole, "on_forked_ranks", forked)
    links, missing = whole._links(["mpi", "shm"], whole.Wishes(), (), lambda *_: None)
    assert [link.transport for link in links] == ["shm"]
    assert missing == ["Transport mpi was not measured: mpirun did not start 2 ranks: no slots."]
    assert whole._links(["mpi"], whole.Wishes(), (), lambda *_: None)[0] == ()
