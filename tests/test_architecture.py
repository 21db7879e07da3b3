"""A module imports only what is below it: DESIGN's arrows, enforced."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "paceline"

# From the bottom up. Modules of one line may not import each other; those inside one folder may.
LAYERS = [
    ["errors"],
    ["common", "look"],
    ["types", "registry"],
    ["spark", "ray"],
    ["data", "models", "optim", "objectives", "record", "transport"],
    ["callbacks", "collectives", "faults"],
    ["codecs", "testbed", "privacy"],
    ["strategies"],
    ["parallel"],
    ["replica"],
    ["request"],
    ["run"],
    ["launch"],
    ["studies", "report", "planning"],
    ["results"],
    ["terminal", "watch"],
    ["bench", "doctor"],
    ["api"],
    ["cli"],
]
LEVEL = {name: number for number, names in enumerate(LAYERS) for name in names}
AT_THE_TOP = {"__init__", "api", "errors", "types", "registry"}
# a peer imports nothing of ours
STANDALONE = {"bench/peers/stock_pytorch.py", "bench/peers/pandas_flights.py"}
MOST_LINES = 400

FILES = sorted(p for p in SOURCE.rglob("*.py") if p.name != "__init__.py")


def named(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those below `if TYPE_CHECKING:`, which the interpreter does not import."""
    for child in ast.iter_child_nodes(node):
        if (
            isinstance(child, ast.If)
            and isinstance(child.test, ast.Name)
            and child.test.id == "TYPE_CHECKING"
        ):
            continue
        yield child
        yield from at_run_time(child)


def modules(path: Path) -> set[str]:
    """What a file imports of Paceline: `transport.base`, say."""
    found = set()
    for node in at_run_time(tree_of(path)):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "paceline"
        ):
            inside = node.module.partition(".")[2]
            found |= {f"{inside}.{a.name}" if inside else a.name for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                a.name.partition(".")[2] for a in node.names if a.name.startswith("paceline.")
            }
    return found


def imports(path: Path) -> set[str]:
    """The top-level parts of Paceline that a file imports."""
    return {module.split(".")[0] for module in modules(path)}


def test_arrows_point_down() -> None:
    wrong = []
    for path in FILES:
        name = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if name not in LEVEL:
            wrong.append(f"{name} has no place in the layers: add it to LAYERS")
            continue
        above = {
            other for other in imports(path) - {name, "__version__"} if LEVEL[other] >= LEVEL[name]
        }
        wrong += [
            f"{named(path)} imports {other}, which is not below {name}" for other in sorted(above)
        ]
    assert wrong == []


def test_the_top_is_a_table_of_contents() -> None:
    assert {path.stem for path in SOURCE.glob("*.py")} == AT_THE_TOP


def test_files_have_one_subject() -> None:
    long = {named(p): lines for p in FILES if (lines := p.read_text().count("\n")) > MOST_LINES}
    silent = [named(p) for p in SOURCE.rglob("*.py") if not ast.get_docstring(tree_of(p))]
    assert (long, silent) == ({}, []), "a file is short, and its docstring says what it is for"


def test_parts_that_only_look_do_not_reach_what_acts() -> None:
    """A report is made from records; one engine of `prepare` does not depend on the other."""
    assert all("testbed" not in imports(p) for p in FILES if named(p).startswith("report/"))
    assert not {m for m in modules(SOURCE / "data/prepare/with_spark.py") if "with_polars" in m}
    assert all("replica" not in imports(p) for p in FILES if named(p).startswith("strategies/"))


def test_peers_use_nothing_of_ours() -> None:
    assert {name: imports(SOURCE / name) for name in STANDALONE} == {
        name: set() for name in STANDALONE
    }


def test_nothing_is_read_from_the_environment() -> None:
    """Except what a launcher sets, in launch/; what Java, Spark and Ray are told that way; and what
    a peer sets for itself.
    """
    others = [
        p
        for p in FILES
        if named(p) not in STANDALONE and not named(p).startswith(("launch/", "spark/", "ray/"))
    ]
    assert [
        named(p) for p in others if "os.environ" in p.read_text() or "getenv" in p.read_text()
    ] == []
