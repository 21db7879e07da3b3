"""Where a drawing puts the ranks, and which way an arrow takes from rank to rank.

Every shape fits a picture that is 520 units wide, so that a phone shows it, too. Ranks are
rectangles; no two of them overlap for up to 16 ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.collectives.schedule import Schedule, Shape

WIDTH = 520.0
PER_ROW = 6  # ranks in one row of a line
# up to how many ranks: width and height of a rank
SIZES = ((4, 128, 80), (6, 118, 78), (8, 104, 74), (10, 92, 68), (12, 80, 63), (14, 70, 58))
SMALLEST = (64.0, 54.0)
APART = 12.0  # an arrow ends so far from its rank

Point = tuple[float, float]


@dataclass(frozen=True)
class Layout:
    """Places of ranks (their centres), and groups to be outlined."""

    height: float
    size: tuple[float, float]  # of a rank
    places: tuple[Point, ...]  # by rank
    groups: tuple[tuple[Point, ...], ...] = ()
    links: tuple[tuple[int, int], ...] = ()  # ranks to be connected by a thin line
    inwards: bool = False  # arrows bend towards the middle

    @property
    def middle(self) -> Point:
        return WIDTH / 2, self.height / 2


def layout(schedule: Schedule) -> Layout:
    """Choose the place of every rank by the shape of the schedule."""
    placed = _places(schedule)
    used = {(min(t.source, t.target), max(t.source, t.target)) for r in schedule.rounds for t in r}
    circle = placed.inwards and not placed.groups
    return placed if circle else replace(placed, links=tuple(sorted(used)))


def _places(schedule: Schedule) -> Layout:
    shape = schedule.shape or Shape("circle", (tuple(range(schedule.ranks)),))
    if schedule.ranks <= 2 and shape.kind != "groups":
        return _line(shape.order[0])
    if shape.kind == "line":
        return _line(shape.order[0])
    if shape.kind == "tree":
        return _tree(schedule, shape.order[0])
    if shape.kind == "star":
        return _star(shape.order[0])
    if shape.kind == "groups":
        return _groups(shape.order)
    return _circle(shape.order[0])


def size_for(ranks: int) -> tuple[float, float]:
    """Width and height of a rank, if so many are drawn around a circle."""
    for most, width, height in SIZES:
        if ranks <= most:
            return float(width), float(height)
    return SMALLEST


def _around(count: int, radius: float, middle: float, turn: float = 0.0) -> list[Point]:
    """Points around a circle, clockwise from the top."""
    angles = [2 * math.pi * (i + turn) / count for i in range(count)]
    return [(WIDTH / 2 + radius * math.sin(a), middle - radius * math.cos(a)) for a in angles]


def _radius(size: tuple[float, float]) -> float:
    return WIDTH / 2 - size[0] / 2 - 4


def _by_rank(order: tuple[int, ...], points: list[Point]) -> tuple[Point, ...]:
    place = dict(zip(order, points, strict=True))
    return tuple(place[rank] for rank in sorted(place))


def _circle(order: tuple[int, ...]) -> Layout:
    size = size_for(len(order))
    radius = _radius(size)
    height = 2 * radius + size[1] + 8
    points = _around(len(order), radius, height / 2)
    return Layout(height, size, _by_rank(order, points), inwards=True)


def _star(order: tuple[int, ...]) -> Layout:
    size = size_for(len(order))
    radius = _radius(size)
    height = 2 * radius + size[1] + 8
    points = [(WIDTH / 2, height / 2), *_around(len(order) - 1, radius, height / 2)]
    return Layout(height, size, _by_rank(order, points))


def _line(order: tuple[int, ...]) -> Layout:
    """Ranks from left to right; long lines turn back at the end of each row."""
    rows = math.ceil(len(order) / PER_ROW)
    per_row = math.ceil(len(order) / rows)
    width = min(128.0, WIDTH / per_row - 36)
    size = (width, 80.0 if width > 100 else 68.0)
    points = []
    for i in range(len(order)):
        row, column = divmod(i, per_row)
        column = column if row % 2 == 0 else per_row - 1 - column
        points.append((WIDTH * (column + 0.5) / per_row, 90 + row * (size[1] + 60)))
    height = 180 + (rows - 1) * (size[1] + 60)
    return Layout(height, size, _by_rank(order, points))


def _tree(schedule: Schedule, order: tuple[int, ...]) -> Layout:
    """The root on top. A rank's parent is the rank that the first of its transfers connects it to,
    on the root's side.
    """
    place = {rank: i for i, rank in enumerate(order)}
    children: dict[int, list[int]] = {rank: [] for rank in order}
    seen: set[int] = set()
    for t in (t for transfers in schedule.rounds for t in transfers):
        parent, child = sorted((t.source, t.target), key=lambda rank: place[rank])
        if child not in seen:
            seen.add(child)
            children[parent].append(child)
    level: dict[int, int] = {}
    column: dict[int, float] = {}
    leaves = 0

    def put(rank: int, depth: int) -> None:
        nonlocal leaves
        level[rank] = depth
        below = sorted(children[rank], key=lambda child: place[child])
        for child in below:
            put(child, depth + 1)
        if below:
            column[rank] = (column[below[0]] + column[below[-1]]) / 2
        else:
            column[rank], leaves = leaves + 0.5, leaves + 1

    for rank in order:
        if rank not in seen:
            put(rank, 0)
    width = min(128.0, WIDTH / leaves - 8)
    size = (width, 80.0 if width > 100 else 58.0)
    step = size[1] + (64 if len(order) <= 8 else 46)
    height = max(level.values()) * step + size[1] + 16
    points = [
        (WIDTH * column[rank] / leaves, 8 + size[1] / 2 + level[rank] * step) for rank in order
    ]
    return Layout(height, size, _by_rank(order, points))


def _groups(order: tuple[tuple[int, ...], ...]) -> Layout:
    """Groups around a circle: the leaders on an inner circle, their members on an outer one."""
    ranks = sum(map(len, order))
    members = [group[1:] for group in order]
    outside = sum(map(len, members))
    size = size_for(max(ranks, 11))
    radius = _radius(size)
    height = 2 * radius + size[1] + 8
    place: dict[int, Point] = {}
    if len(order) == 1 or not outside:
        everyone = tuple(rank for group in order for rank in group)
        if not outside:
            return _circle(everyone)
        star = _star(everyone)
        return Layout(star.height, star.size, star.places, (star.places,))
    # each group gets a part of the circle by its members, an empty one a small part
    shares = [max(len(group), 0.5) for group in members]
    begin, total = -shares[0] / 2, sum(shares)
    for group, share in zip(order, shares, strict=True):
        near = _on_circle(begin + share / 2, total, radius * 0.5, height / 2)
        place[group[0]] = near
        for i, rank in enumerate(group[1:]):
            at = begin + share * (i + 0.5) / (len(group) - 1)
            place[rank] = _on_circle(at, total, radius, height / 2)
        begin += share
    outlines = tuple(tuple(place[rank] for rank in group) for group in order)
    places = tuple(place[rank] for rank in sorted(place))
    return Layout(height, size, places, outlines, inwards=True)


def _on_circle(at: float, total: float, radius: float, middle: float) -> Point:
    angle = 2 * math.pi * at / total
    return WIDTH / 2 + radius * math.sin(angle), middle - radius * math.cos(angle)


@dataclass(frozen=True)
class Arrow:
    """A quadratic curve from rank to rank."""

    start: Point
    bend: Point
    end: Point

    def at(self, share: float) -> Point:
        """The point after this share of the way."""
        a, b, c = (1 - share) ** 2, 2 * share * (1 - share), share**2
        return (
            a * self.start[0] + b * self.bend[0] + c * self.end[0],
            a * self.start[1] + b * self.bend[1] + c * self.end[1],
        )

    @property
    def path(self) -> str:
        """The curve in the words of SVG."""
        (a, b), (c, d), (e, f) = self.start, self.bend, self.end
        return f"M{a:.1f} {b:.1f}Q{c:.1f} {d:.1f} {e:.1f} {f:.1f}"


def arrow(drawn: Layout, source: int, target: int, both_ways: bool) -> Arrow:
    """The arrow of a transfer. Arrows in both directions bend apart, each to its right."""
    (a, b), (c, d) = drawn.places[source], drawn.places[target]
    apart = math.hypot(c - a, d - b)
    x, y = (a + c) / 2, (b + d) / 2
    to_x, to_y = drawn.middle[0] - x, drawn.middle[1] - y
    inside = math.hypot(to_x, to_y)
    if drawn.inwards and inside > 40:
        # neighbours' arrows bend into the circle; of two directions, one bends further; an arrow
        # from or to the middle stays straight
        turn = ((c - a) * to_y - (d - b) * to_x) / (apart * inside)
        pull = max(0.0, min(200 - apart, 80, 0.4 * inside)) + (90 if both_ways and turn > 0 else 0)
        x += pull * abs(turn) * to_x / inside
        y += pull * abs(turn) * to_y / inside
    elif both_ways:
        x, y = x - 0.35 * (d - b), y + 0.35 * (c - a)
    bend = (x, y)
    return Arrow(
        _leaving(drawn, drawn.places[source], bend), bend, _leaving(drawn, (c, d), bend, APART)
    )


def _leaving(drawn: Layout, place: Point, towards: Point, apart: float = 3.0) -> Point:
    """The point where the way from a rank's centre leaves the rank's rectangle."""
    dx, dy = towards[0] - place[0], towards[1] - place[1]
    half_x, half_y = drawn.size[0] / 2 + apart, drawn.size[1] / 2 + apart
    share = min(half_x / abs(dx) if dx else math.inf, half_y / abs(dy) if dy else math.inf, 1.0)
    return place[0] + share * dx, place[1] + share * dy
