"""The drawings show the states of symbolic execution."""

import io
import itertools
import json
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from PIL import Image

from paceline.collectives.base import SCHEDULES, schedule_of
from paceline.collectives.draw import (
    contributions,
    describe,
    frames,
    html,
    png,
    step_pictures,
    svg,
)
from paceline.collectives.draw.layout import WIDTH, arrow, layout
from paceline.collectives.draw.scene import scene
from paceline.collectives.schedule import Schedule, Shape, Transfer, states
from paceline.errors import BadRequest, UnknownName
from paceline.look import WORKERS
from paceline.registry import operations


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_frames_are_the_symbolic_states(name: str) -> None:
    """P = 5: every cell of every step, read back from the drawing."""
    schedule = SCHEDULES[name](5)
    drawn = frames(schedule)
    assert [f.step for f in drawn] == list(range(len(schedule.rounds) + 1))
    for frame, state in zip(drawn, states(schedule), strict=True):
        for rank in range(5):
            for chunk in range(schedule.chunks):
                held = {r for r in range(5) if state[rank][chunk][r]}
                assert parsed(frame.cells[rank][chunk]) == held
                assert frame.complete[rank][chunk] == (held == set(range(5)))
    assert all(all(row) for row in drawn[-1].complete)


def parsed(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def test_a_ring_of_five_has_steps_0_to_8() -> None:
    drawn = frames(SCHEDULES["ring"](5))
    assert [f.phase for f in drawn] == ["start"] + ["share-reduce"] * 4 + ["share-only"] * 4


SVG = "{http://www.w3.org/2000/svg}"
EVERYTHING = [
    *sorted(SCHEDULES),
    *sorted(operations.names()),
    "stepwise:chunked=false",
    "hierarchical:group=4",
    "broadcast:root=1",
]


def words_of(picture: str) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(picture).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("ranks", [2, 5, 16])
def test_pictures_and_pages_are_well_formed_and_stand_alone(name: str, ranks: int) -> None:
    schedule = schedule_of(name, ranks)
    steps = len(schedule.rounds) + 1
    words = words_of(svg(schedule))
    assert [w for w in words if re.match(r"step \d+: ", w)] == [
        f"step {f.step}: {f.phase}" for f in frames(schedule)
    ]
    single = step_pictures(schedule)
    assert len(single) == steps
    assert len({ElementTree.fromstring(p).get("viewBox") for p in single}) == 1
    page = html(schedule)
    assert not re.search(r'(src|href)="|https?://', page)
    data = data_of(page)
    assert len(data["scenes"][0]["steps"]) == steps


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_scene_is_the_symbolic_state(name: str) -> None:
    """Every chunk of every step, and what every message carries, for five ranks."""
    schedule = schedule_of(name, 5)
    drawn = scene(schedule)
    history = states(schedule)
    held = [kind["ranks"] for kind in drawn["kinds"]]
    for number, step in enumerate(drawn["steps"]):
        for rank, row in enumerate(step["cells"]):
            for chunk, kind in enumerate(row):
                now = history[number][rank][chunk]
                assert held[kind] == [r for r in range(5) if now[r]]
                assert drawn["kinds"][kind]["complete"] == all(now)
                changed = number and now != history[number - 1][rank][chunk]
                assert not changed or (rank, chunk) in step["changed"]
        transfers = schedule.rounds[number - 1] if number else ()
        for message, t in zip(step["messages"], transfers, strict=True):
            carried = [history[number - 1][t.source][c] for c in range(t.start, t.stop)]
            assert [held[k] for k in message["kinds"]] == [
                [r for r in range(5) if holding[r]] for holding in carried
            ]


@pytest.mark.parametrize("name", [*EVERYTHING, "hierarchical:group=3", "hierarchical:group=16"])
def test_ranks_do_not_overlap_and_stay_inside(name: str) -> None:
    for ranks in range(2, 17):
        drawn = layout(schedule_of(name, ranks))
        (width, height), places = drawn.size, drawn.places
        assert len(places) == ranks
        for (a, b), (c, d) in itertools.combinations(places, 2):
            assert abs(a - c) >= width or abs(b - d) >= height, (name, ranks)
        for x, y in places:
            assert width / 2 <= x <= WIDTH - width / 2, (name, ranks)
            assert height / 2 <= y <= drawn.height - height / 2, (name, ranks)


def test_shapes() -> None:
    middle = layout(schedule_of("star", 7)).places[0]
    assert middle == layout(schedule_of("star", 7)).middle
    line = layout(schedule_of("stepwise:chunked=false,start=2", 4)).places
    assert [rank for rank, _ in sorted(enumerate(line), key=lambda p: p[1][0])] == [2, 3, 0, 1]
    tree = layout(schedule_of("broadcast:root=3", 8)).places
    assert min(range(8), key=lambda rank: tree[rank][1]) == 3
    assert len(layout(schedule_of("hierarchical:group=4", 16)).groups) == 4


def test_an_arrow_ends_at_its_rank() -> None:
    drawn = layout(schedule_of("ring", 6))
    line = arrow(drawn, 0, 1, False)
    for point, rank in ((line.start, 0), (line.end, 1)):
        assert abs(point[0] - drawn.places[rank][0]) <= drawn.size[0] / 2 + 13
        assert abs(point[1] - drawn.places[rank][1]) <= drawn.size[1] / 2 + 13
    assert line.at(0) == line.start
    assert line.at(1) == line.end
    there, back = arrow(drawn, 0, 3, True), arrow(drawn, 3, 0, True)
    assert math.dist(there.at(0.5), back.at(0.5)) > 30


def test_two_schedules_side_by_side() -> None:
    both = (schedule_of("ring", 4), schedule_of("tree", 4))
    pictures = step_pictures(*both)
    assert len(pictures) == 7
    words = words_of(pictures[6])
    assert {"step 6: share-only", "step 4: done", "tree was complete after 4 rounds"} <= set(words)
    data = data_of(html(*both, latency_s=3e-4, bandwidth=7e8, size_bytes=12345))
    assert [s["name"] for s in data["scenes"]] == ["ring", "tree"]
    for what, value in (("latency", 3e-4), ("bandwidth", 7e8), ("size", 12345)):
        assert data["choices"][what][data["chosen"][what]]["value"] == value


def test_png() -> None:
    image = Image.open(io.BytesIO(png(step_pictures(schedule_of("ring", 3))[1], scale=1.0)))
    assert image.size[0] == round(WIDTH + 72)
    colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    for rank in range(3):
        assert tuple(int(WORKERS[rank][i : i + 2], 16) for i in (1, 3, 5)) in colours


def test_what_cannot_be_drawn() -> None:
    small = Schedule("own", 2, 1, ((Transfer(0, 1, 0, 1, True),),), ("one",))
    assert "own" in html(small)
    for wrong, message in (
        (replace(small, ranks=17), "up to 16 ranks"),
        (replace(small, chunks=17), "17 chunks: up to 16"),
        (replace(small, shape=Shape("line", ((0,),))), "each of its 2 ranks once"),
        (replace(small, rounds=((Transfer(0, 5, 0, 1, True),),)), "to rank 5, but there are 2"),
        (replace(small, rounds=((Transfer(0, 1, 0, 1, True, at=3),),)), "and 1 chunks"),
    ):
        for draw in (html, svg):
            with pytest.raises(BadRequest, match=message):
                draw(wrong)
    with pytest.raises(BadRequest, match="one or two schedules, not 3"):
        html(small, small, small)
    with pytest.raises(BadRequest, match="same number of ranks"):
        html(small, replace(small, ranks=3))
    with pytest.raises(BadRequest, match="bandwidth and size must be above 0"):
        html(small, bandwidth=0)


def test_words() -> None:
    assert contributions((1, 1, 1, 0, 1)) == "0-2,4"
    assert contributions((0, 2, 0)) == "1x2"
    assert contributions((0, 0)) == "-"
    assert describe(Transfer(0, 1, 2, 3, True), 4) == "0 -> 1: chunk 2, added"
    assert describe(Transfer(0, 1, 0, 4, False), 4) == "0 -> 1: everything, kept"
    assert describe(Transfer(0, 1, 0, 2, False), 4) == "0 -> 1: chunks 0-1, kept"


def test_names() -> None:
    assert schedule_of("hierarchical:group=4", 8).ranks == 8
    with pytest.raises(UnknownName, match="native has none"):
        schedule_of("native", 4)
