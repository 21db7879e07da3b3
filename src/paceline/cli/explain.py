"""`paceline explain`"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from paceline.cli import explained

MOST_NAMES = 2
SPLITS = {"halo": "cnn", "tensor": "mlp"}  # pictures of split models, and the model by default
OPTIONS = {
    "collectives": ("workers", "latency", "bandwidth", "size"),
    "timetables": ("stages", "micro"),
    "halo": ("model", "workers", "input", "rows"),
    "tensor": ("model", "workers", "input"),
}


@dataclass(frozen=True)
class Drawing:
    """What can be made of the names that were given."""

    html: Callable[[], str]
    svg: Callable[[], str]
    steps: Callable[[], list[str]]
    show: Callable[[], None]  # in the terminal


@click.command()
@click.argument("names", metavar="NAME[:key=value,...] [NAME]", nargs=-1, required=True)
@click.option(
    "--workers",
    default=4,
    show_default=True,
    type=click.IntRange(1),
    help="how many ranks, at most 16",
)
@click.option(
    "--stages",
    default=4,
    show_default=True,
    help="of a timetable: how many workers hold the model, at most 16",
)
@click.option(
    "--micro",
    default=8,
    show_default=True,
    help="of a timetable: micro-batches, at most 64",
)
@click.option("--model", default=None, help="for halo (default: cnn) and tensor (default: mlp)")
@click.option(
    "--input",
    "input_",
    default="1x28x28",
    show_default=True,
    metavar="CxHxW",
    help="of the model of halo and tensor",
)
@click.option("--rows", default=None, type=int, help="of the images of halo, instead of H")
@click.option(
    "--html", "html_file", default=None, metavar="FILE", help="write a page that plays it"
)
@click.option("--open", "opens", is_flag=True, help="open the page in a browser")
@click.option(
    "--svg",
    default=None,
    metavar="FILE|DIR/",
    help="draw all steps as one picture; into a folder: one picture per step",
)
@click.option("--png", default=None, metavar="FILE|DIR/", help="the same as PNG")
@click.option("--latency", default="50us", show_default=True, help="of a link, for the seconds")
@click.option("--bandwidth", default="1gbit", show_default=True, help="of a link, each direction")
@click.option("--size", default="4MB", show_default=True, help="of the buffer")
@click.option("--plugin", multiple=True, metavar="FILE", help="a Python file that registers more")
@click.option("--debug", is_flag=True, help="show tracebacks")
@click.pass_context
def explain(
    ctx: click.Context,
    names: tuple[str, ...],
    workers: int,
    stages: int,
    micro: int,
    model: str | None,
    input_: str,
    rows: int | None,
    html_file: str | None,
    opens: bool,
    svg: str | None,
    png: str | None,
    latency: str,
    bandwidth: str,
    size: str,
    plugin: tuple[str, ...],
    debug: bool,
) -> None:
    """Show how workers cooperate, step by step, in the terminal, as a page or as pictures.

    \b
    NAME is
      a collective or an operation    which rank sends which chunk to which rank, whose
                                      contributions each rank holds, rounds, bytes and seconds
      a timetable                     a pipeline: which worker computes what and when, its bubble
      halo                            images split by rows: who owns which rows, who sends which
      tensor                          split weights: who has which part, what is exchanged

    `paceline list` has their names: collectives, operations, timetables. Two collectives, or two
    timetables, are shown on one clock.

    \b
    Examples:
      paceline explain ring --workers 4
      paceline explain ring tree --workers 8 --open
      paceline explain halving-doubling --workers 6 --html hd.html
      paceline explain ring --svg slides/ --latency 1ms --bandwidth 100mbit
      paceline explain hierarchical:group=4 --workers 8 --png h.png
      paceline explain stepwise:start=1
      paceline explain 1f1b --stages 4 --micro 8
      paceline explain gpipe interleaved:each=2 --stages 4 --open
      paceline explain halo --model cnn --workers 3
      paceline explain tensor --model mlp --workers 2 --svg mlp.svg
    """
    from paceline.errors import BadRequest
    from paceline.look.picture import png as png_of
    from paceline.registry import load_plugin

    for file in plugin:
        load_plugin(file)
    if len(names) > MOST_NAMES:
        raise BadRequest(f"explain shows one or two algorithms, not {len(names)}")
    if len(set(names)) < len(names):
        raise BadRequest(f"{names[0]} is named twice; name two different algorithms")
    kind = _kind(names)
    _refuse_others(ctx, names[0], kind)
    if kind == "collectives":
        drawing = _collectives(names, workers, latency, bandwidth, size)
    elif kind == "timetables":
        drawing = _timetables(names, stages, micro)
    else:
        drawing = _split(kind, model or SPLITS[kind], _shape(input_, rows), workers)
    if opens and not html_file:
        html_file = str(Path(tempfile.mkdtemp(prefix="paceline-")) / "explain.html")
    if html_file:
        _write(Path(html_file), drawing.html().encode())
    for where, ending, draw in (
        (svg, "svg", str.encode),
        (png, "png", png_of),
    ):
        if where and (where.endswith("/") or Path(where).is_dir()):
            _write_steps(Path(where), ending, [draw(p) for p in drawing.steps()])
        elif where:
            _write(Path(where), draw(drawing.svg()))
    if opens and html_file:
        _open(Path(html_file))
    if not (svg or png or html_file):
        drawing.show()


def _kind(names: Sequence[str]) -> str:
    """What the names are: collectives (and operations), timetables, halo or tensor."""
    from paceline.collectives.base import SCHEDULES
    from paceline.errors import BadRequest, UnknownName
    from paceline.registry import Spec, collectives, operations, timetables

    collectives.discover()
    found = {}
    for name in names:
        plain = Spec.of(name).name
        if plain in SPLITS:
            if name != plain:
                options = ", ".join(f"--{option}" for option in OPTIONS[plain])
                raise BadRequest(f"{name}: {plain} has no options after a colon; use {options}")
            found[name] = plain
        elif plain in timetables:
            found[name] = "timetables"
        elif plain in SCHEDULES or plain in operations:
            found[name] = "collectives"
        else:
            known = [*SCHEDULES, *operations.names(), *timetables.names(), *SPLITS]
            hint = "(native has none: the transport's library implements it.)"
            raise UnknownName("schedule", plain, known, hint)
    kinds = set(found.values())
    if len(names) > 1 and (len(kinds) > 1 or kinds & set(SPLITS)):
        raise BadRequest(
            f"{' and '.join(names)} cannot be shown together: name two collectives, or two"
            " timetables"
        )
    return kinds.pop()


def _refuse_others(ctx: click.Context, name: str, kind: str) -> None:
    """Raise BadRequest for options of other kinds of pictures."""
    from click.core import ParameterSource

    from paceline.errors import BadRequest

    for option in dict.fromkeys(option for own in OPTIONS.values() for option in own):
        source = ctx.get_parameter_source("input_" if option == "input" else option)
        if source is ParameterSource.COMMANDLINE and option not in OPTIONS[kind]:
            owners = ", ".join(k for k, own in OPTIONS.items() if option in own)
            allowed = ", ".join(f"--{own}" for own in OPTIONS[kind])
            raise BadRequest(f"--{option} is an option of {owners}; {name} takes {allowed}")


def _shape(text: str, rows: int | None) -> tuple[int, ...]:
    from paceline.errors import BadRequest

    words = text.lower().split("x")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise BadRequest(f"--input {text}: give channels x height x width, such as 3x512x512")
    shape = [int(word) for word in words]
    if rows is not None:
        if rows < 1:
            raise BadRequest(f"--rows {rows}: it must be 1 or more")
        if len(shape) != 3:
            raise BadRequest(f"--rows {rows} needs images: --input {text} has no height")
        shape[1] = rows
    return tuple(shape)


def _collectives(
    names: Sequence[str], workers: int, latency: str, bandwidth: str, size: str
) -> Drawing:
    from paceline.collectives.base import schedule_of
    from paceline.collectives.draw import MOST_RANKS, html, step_pictures, svg
    from paceline.common.units import RATES, TIMES, parse_bytes, parse_unit
    from paceline.errors import BadRequest

    if workers > MOST_RANKS:
        raise BadRequest(f"--workers {workers}: up to {MOST_RANKS} ranks can be drawn legibly")
    link = {
        "latency_s": parse_unit(latency, TIMES, "--latency"),
        "bandwidth": parse_unit(bandwidth, RATES, "--bandwidth"),
        "size_bytes": float(parse_bytes(size, "--size")),
    }
    if not link["bandwidth"]:
        raise BadRequest(f"--bandwidth {bandwidth}: it must be more than 0, such as 1gbit")
    schedules = [replace(schedule_of(name, workers), name=name) for name in names]
    return Drawing(
        lambda: html(*schedules, **link),
        lambda: svg(*schedules),
        lambda: step_pictures(*schedules),
        lambda: explained.print_schedules(schedules, link),
    )


def _timetables(names: tuple[str, ...], stages: int, micro: int) -> Drawing:
    from paceline.parallel.draw.explain import explain_timetables

    shown = explain_timetables(names, stages, micro)
    return Drawing(
        shown.html,
        shown.svg,
        shown.step_pictures,
        lambda: explained.print_timetables(shown, names, stages, micro),
    )


def _split(kind: str, model: str, given: tuple[int, ...], workers: int) -> Drawing:
    from paceline.parallel.draw.explain import explain_halo, explain_tensor

    draw, show = {
        "halo": (explain_halo, explained.print_steps),
        "tensor": (explain_tensor, explained.print_figures),
    }[kind]
    shown = draw(model, given, workers)
    return Drawing(shown.html, shown.svg, shown.step_pictures, lambda: show(shown))


def _write(file: Path, content: bytes) -> None:
    from paceline.common.files import write_whole
    from paceline.errors import BadRequest

    if file.is_dir():
        raise BadRequest(f"{file} cannot be written: it is a folder; name a file in it")
    try:
        write_whole(file, content)
    except OSError as error:
        raise BadRequest(f"{file} cannot be written: {error.strerror}") from None
    click.echo(f"written: {file}", err=True)


def _write_steps(folder: Path, ending: str, pictures: Sequence[bytes]) -> None:
    """Write step-00, step-01, ...; remove those of a longer algorithm that was drawn before."""
    from paceline.common.files import write_whole
    from paceline.errors import BadRequest

    digits = max(2, len(str(len(pictures) - 1)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for step, picture in enumerate(pictures):
            written.append(folder / f"step-{step:0{digits}}.{ending}")
            write_whole(written[-1], picture)
        for digit in ("", "[0-9]"):  # drawn with two digits, or with three
            for old in folder.glob(f"step-[0-9][0-9]{digit}.{ending}"):
                if old not in written:
                    old.unlink()
    except OSError as error:
        raise BadRequest(f"{folder} cannot be written: {error.strerror}") from None
    first, last = (f"{step:0{digits}}" for step in (0, len(pictures) - 1))
    click.echo(f"written: {folder}/step-{first}.{ending} to {last}", err=True)


def _open(page: Path) -> None:
    import webbrowser

    from paceline.errors import BadRequest

    if not webbrowser.open(page.resolve().as_uri()):
        raise BadRequest(f"no browser could be started; open {page} yourself")
