"""The drawings of timetables and of split models show what is computed and exchanged."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from paceline.errors import BadRequest
from paceline.look import LIGHT
from paceline.look.picture import png
from paceline.parallel import domain, tensor
from paceline.parallel.base import Given
from paceline.parallel.draw import halo, split, timeline
from paceline.parallel.draw.built import NUMBER_BYTES, build
from paceline.parallel.draw.explain import explain_halo, explain_tensor, explain_timetables
from paceline.parallel.draw.facts import facts_of
from paceline.parallel.draw.lines import blocks, mark
from paceline.parallel.draw.scene import Explained
from paceline.parallel.exchange import Exchange
from paceline.parallel.prove import prove, room
from paceline.parallel.rows import Halo, Window, even, proved
from paceline.parallel.rows import halo as moved_rows
from paceline.parallel.timetable import Task, timing
from paceline.registry import models, timetables

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["1f1b", "gpipe", "interleaved", "interleaved:each=1", "zero-bubble"]
IMAGE = (1, 28, 28)


def names_in(picture: str) -> Counter[str]:
    """The items of a picture that have a name, by how often they are drawn."""
    found = ElementTree.fromstring(picture).iter(f"{SVG}g")
    return Counter(g.get("class") for g in found if g.get("class"))


def words_in(picture: str) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    assert not re.search(r'(src|href)="|https?://', page)
    return json.loads(found[1])


# --- timetables


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "micros"), [(1, 1), (2, 4), (4, 8), (8, 16)])
def test_every_task_is_drawn_once(name: str, stages: int, micros: int) -> None:
    table = timetables.build(name, ranks=stages, micros=micros)
    tasks = Counter(str(task) for tasks in table.ranks for task in tasks)
    shown = explain_timetables([name], stages, micros)
    assert names_in(shown.svg()) == tasks
    drawn = [item[6] for item in data_of(shown.html())["scenes"][0]["items"] if item[6]]
    assert Counter(drawn) == tasks


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (3, 3), (4, 8), (8, 16)])
def test_boxes_are_where_the_timing_says(name: str, stages: int, micros: int) -> None:
    """Boxes of a row do not overlap, and what they leave empty is the bubble."""
    facts = facts_of(name, stages, micros)
    (scene,) = explain_timetables([name], stages, micros).scenes
    assert scene.cursor is not None
    unit = scene.cursor[1]
    rows: dict[float, list[tuple[float, float]]] = {}
    for item in scene.items:
        if item.name:
            rect = ElementTree.fromstring(f"<g>{item.body}</g>")[0]
            x, wide, y = (float(rect.get(key, "nan")) for key in ("x", "width", "y"))
            rows.setdefault(y, []).append((x, wide + 1))  # boxes are one unit apart
            assert item.end is not None
            assert x == pytest.approx(item.start * unit + 0.5, abs=0.2)
            assert wide + 1 == pytest.approx((item.end - item.start) * unit, abs=0.2)
    assert len(rows) == stages
    for row in rows.values():
        row.sort()
        assert all(a + wide <= b + 0.3 for (a, wide), (b, _) in itertools.pairwise(row))
    filled = sum(wide for row in rows.values() for _, wide in row)
    idle = 1 - filled / (stages * facts.total * unit)
    assert idle == pytest.approx(timing(facts.table).idle, abs=2e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "micros"), [(2, 2), (4, 8), (8, 8)])
def test_printed_figures_are_those_of_the_timetable(name: str, stages: int, micros: int) -> None:
    table = timetables.build(name, ranks=stages, micros=micros)
    idle = f"{100 * timing(table).idle:.1f}%"
    shown = explain_timetables([name], stages, micros)
    messages = sum(len(table.sends(a, b)) for a in range(stages) for b in range(stages))
    (line,) = (w for w in words_in(shown.svg()) if w.startswith("idle "))
    assert line.startswith(f"idle {idle}, formula ")
    assert line.endswith(f"= {idle}; time {shown.scenes[0].end:g}; {messages} messages")
    row = next(row for row in shown.table.rows if row[0] == name)
    assert (row[2], row[5]) == (idle, str(messages))
    live = prove(table, room(table)).live
    kept = [w for w in words_in(shown.svg()) if w.startswith("keeps ")]
    assert kept == [f"keeps {count}" for count in live]
    facts = facts_of(name, stages, micros)
    for rank, most in enumerate(live):
        times = [step.at for step in shown.scenes[0].steps]
        assert max(timeline.kept(facts, rank, at) for at in times) == most
        assert timeline.kept(facts, rank, facts.total) == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_formula_is_the_timing(name: str) -> None:
    for stages in (1, 2, 3, 5, 8):
        for times in (1, 2, 4):
            table = timetables.build(name, ranks=stages, micros=stages * times)
            assert table.formula is not None
            assert table.formula.value == pytest.approx(timing(table).idle, abs=1e-12)
    few = timetables.build("zero-bubble", ranks=8, micros=2)
    assert few.formula is None  # it holds for as many micro-batches as ranks
    assert "none" in facts_of("zero-bubble", 8, 2).summary


def test_two_timetables_are_on_one_clock() -> None:
    """Stages of interleaved are half as long, so both clocks count the same seconds."""
    shown = explain_timetables(["1f1b", "interleaved:each=2"], 4, 8)
    plain, interleaved = shown.scenes
    assert (plain.end, interleaved.end) == (33, 28.5)
    assert plain.cursor == interleaved.cursor
    assert plain.size[0] == interleaved.size[0]
    pictures = shown.step_pictures()
    assert len({ElementTree.fromstring(p).get("viewBox") for p in pictures}) == 1
    assert "interleaved:each=2, time 28.5 of 28.5 (complete)" in words_in(pictures[-1])
    assert sum(names_in(pictures[0]).values()) == 0  # nothing has begun
    assert sum(names_in(pictures[-1]).values()) == 4 * 16 + 4 * 32


def test_passes_and_stages_have_colours_of_their_own() -> None:
    shades = {
        timeline.shade(Task(kind, stage, 0), 4, 4)  # type: ignore[arg-type]
        for kind in "FBW"
        for stage in range(0, 16, 4)
    }
    assert len(shades) == 12
    assert timeline.shade(Task("F", 0, 0), 4, 1) == LIGHT["pass-f"]


@pytest.mark.parametrize("columns", [20, 78, 200])
@pytest.mark.parametrize("name", NAMES)
def test_the_terminal_shows_every_task_once(name: str, columns: int) -> None:
    facts = facts_of(name, 4, 12)
    said: list[list[str]] = [[] for _ in range(4)]
    for low, high, rows in blocks(facts, columns):
        for rank, row in enumerate(rows):
            line = "".join(words for words, _ in row)
            assert len(line) == 3 * (high - low) <= columns
            said[rank] += re.findall(r"[A-Za-z]\d+", line)
            assert all(set(words) == {" "} for words, task in row if task is None)
    for rank, tasks in enumerate(facts.table.ranks):
        assert said[rank] == [mark(facts, task) for task in tasks]


# --- rows of images


def test_rows_are_those_of_the_layers() -> None:
    found = halo.moves(build("cnn", IMAGE), 3)
    windows = [Window(5), Window(2, 2), Window(5), Window(2, 2)]
    rows, expected = 28, []
    for window in windows:
        made = even(window.outputs(rows), 3)
        expected.append(moved_rows(even(rows, 3), [window.needs(span, rows) for span in made]))
        rows = window.outputs(rows)
    assert [m.movement for m in found[:-1]] == expected
    assert all(proved(m.movement, m.rows) == () for m in found)
    assert found[-1].layer == "head (7 to 11)"
    assert found[-1].movement.held == ((0, 4),) * 3


@pytest.mark.parametrize("workers", [2, 3, 8, 16])
def test_every_transfer_of_rows_is_drawn_once(workers: int) -> None:
    built = build("cnn", IMAGE)
    shown = explain_halo("cnn", IMAGE, workers)
    found = halo.moves(built, workers)
    sent = Counter(m.sentence(t).split(",")[0] for m in found for t in m.sends)
    assert names_in(shown.svg()) == sent
    assert len(shown.step_pictures()) == len(found) + 1
    items = [item for item in data_of(shown.html())["scenes"][0]["items"] if item[6]]
    assert Counter(item[6] for item in items) == sent
    assert all(item[5] for item in items)  # each comes from another column
    total = next(row for row in shown.table.rows if row[0] == "all")
    assert int(total[3]) == sum(m.movement.sent(r) for m in found for r in range(workers))


class Heard(Exchange):
    """An exchange of one rank that notes what it would send, and makes up the answers."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        group.heard = self.heard = []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.heard.append(("sum", tensor.numel()))
        return tensor.detach().clone()

    def stack(self, x: torch.Tensor, dim: int, spans: Any) -> torch.Tensor:
        shape = list(x.shape)
        shape[dim] = spans[-1][1]
        self.heard.append(("stack", math.prod(shape)))
        return x.new_zeros(shape)

    def move(self, x: torch.Tensor, movement: Halo) -> torch.Tensor:
        me = self.group.rank
        row = x.shape[1] * x.shape[3] * NUMBER_BYTES
        self.heard.append(("move", movement.sent(me) * row))
        low, high = movement.held[me]
        return x.new_zeros(*x.shape[:2], high - low, *x.shape[3:])


def passed(form: Any, name: str, shape: tuple[int, ...], rank: int, size: int) -> Any:
    """What one rank exchanges in a forward and in a backward pass of one sample; its part."""
    group = SimpleNamespace(rank=rank, size=size)
    sample = torch.ones(1, *shape)
    model = models.build(name, input_shape=shape, classes=10)
    part = form().split(model, Given(group, sample, 0, group))  # type: ignore[arg-type]
    part.begin(0, 0)
    outputs = part.model(sample)
    forward = list(group.heard)
    outputs.sum().backward()
    return forward, group.heard[len(forward) :], part


@pytest.mark.parametrize("workers", [2, 3])
def test_bytes_of_rows_are_those_of_the_code(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domain, "Exchange", Heard)
    there = back = 0
    for rank in range(workers):
        forward, backward, _ = passed(domain.Domain, "cnn", IMAGE, rank, workers)
        there += sum(size for how, size in forward if how == "move")
        back += sum(size for how, size in backward if how == "move")
    found = halo.moves(build("cnn", IMAGE), workers)
    assert there == sum(m.sent_bytes for m in found[:-1])
    # the backward pass sends a row's gradient back from where it was needed
    assert back == sum(m.sent_bytes for m in found if m.back)


# --- weights


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", IMAGE),
        ("mlp:hidden=300", IMAGE),
        ("mlp:hidden=12x9x7x6", IMAGE),
        ("cnn", IMAGE),
        ("transformer:blocks=1", IMAGE),
        ("alexnet", (3, 32, 32)),
    ],
)
def test_exchanges_and_weights_are_those_of_the_code(
    name: str, shape: tuple[int, ...], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor, "Exchange", Heard)
    forward, backward, part = passed(tensor.TensorForm, name, shape, 0, workers)
    found = split.parts(build(name, shape), workers)
    assert [(p.forward.how, p.forward.numbers) for p in found if p.forward] == forward
    behind = [(p.backward.how, p.backward.numbers) for p in found if p.backward]
    assert behind[::-1] == backward
    assert sum(p.held for p in found) == sum(p.numel() for p in part.model.parameters())
    whole = build(name, shape).model
    assert sum(p.weights for p in found) == sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_every_exchange_is_drawn_once(workers: int) -> None:
    shown = explain_tensor("cnn", IMAGE, workers)
    found = split.parts(build("cnn", IMAGE), workers)
    exchanges = [e.words for p in found for e in (p.backward, p.forward) if e]
    assert [w for w in words_in(shown.svg()) if w.startswith(("sum ", "stack "))] == exchanges
    assert len(shown.step_pictures()) == 2 * len(found) + 1
    assert len(data_of(shown.html())["scenes"][0]["steps"]) == 2 * len(found) + 1
    assert shown.table.rows[-1][0] == "all"


# --- all of them


def some() -> list[Explained]:
    return [
        explain_timetables(["zero-bubble", "gpipe"], 3, 5),
        explain_halo("cnn-tanh", (3, 40, 30), 5),
        explain_tensor("transformer", IMAGE, 4),
    ]


@pytest.mark.parametrize("shown", some(), ids=["timetables", "halo", "tensor"])
def test_pictures_stand_alone(shown: Explained) -> None:
    for picture in (shown.svg(), *shown.step_pictures()):
        ElementTree.fromstring(picture)
        assert "var(--" not in picture
    assert png(shown.svg(), scale=0.5).startswith(b"\x89PNG")
    page = shown.html()
    assert page.count("@") == page.count("@media")  # every mark of the template is replaced
    assert shown.heading in page


def test_what_cannot_be_drawn() -> None:
    for call, message in (
        (lambda: explain_timetables(["1f1b"], 17, 4), "up to 16 stages"),
        (lambda: explain_timetables(["1f1b"], 4, 65), "up to 64 micro-batches"),
        (lambda: explain_timetables(["1f1b"], 4, 0), "micro=0: it must be 1 or more"),
        (lambda: explain_timetables(["interleaved"], 4, 6), "not a multiple of 4"),
        (lambda: explain_timetables(["interleaved:each=8"], 4, 8), "has 32 stages: up to 16"),
        (lambda: explain_timetables(["1f1b"] * 3, 4, 8), "one or two timetables, not 3"),
        (lambda: explain_halo("mlp", IMAGE, 2), "domain splits images"),
        (lambda: explain_halo("cnn", IMAGE, 17), "up to 16 workers"),
        (lambda: explain_halo("cnn-tanh", (1, 14, 14), 15), "cannot be split over 15 workers"),
        (lambda: explain_tensor("linear", IMAGE, 2), "can be split over 2 workers"),
        (lambda: explain_tensor("mlp", IMAGE, 17), "up to 16 workers"),
        (lambda: explain_halo("resnet50", (7, 0), 2), "resnet50"),
    ):
        with pytest.raises(BadRequest, match=message):
            call()
