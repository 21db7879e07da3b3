"""A module imports only what is below it: DESIGN's arrows, enforced."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "paceline"

# From the bottom up; modules of one line may not import each other, those inside one package may.
LAYERS = [
    ["errors", "allocator"],
    ["types", "seeding", "registry", "units"],
    ["config", "spark"],
    ["data", "models", "optim", "objectives", "record", "transport"],
    ["collectives", "faults"],
    ["codecs", "testbed", "privacy"],
    ["strategies", "checkpoint"],
    ["buckets", "balance", "memory_format"],
    ["replica"],
    ["sizes", "protection", "fitting"],
    ["job"],
    ["evaluation", "rank", "private"],
    ["server", "snapshot"],
    ["worker"],
    ["launch"],
    ["progress", "studies", "loop", "report"],
    ["board"],
    ["bench", "doctor"],
    ["api"],
    ["cli"],
]
LEVEL = {name: number for number, names in enumerate(LAYERS) for name in names}
STANDALONE = {"bench/peers/stock_pytorch.py", "bench/peers/pandas_flights.py"}  # a peer uses nothing of ours

FILES = sorted(p for p in SOURCE.rglob("*.py") if p.name != "__init__.py")


def imports(path: Path) -> set[str]:
    """Top-level parts of Paceline that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "paceline":
            parts = node.module.split(".")[1:]
            found |= {parts[0]} if parts else {a.name for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("paceline.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_arrows_point_down(path: Path) -> None:
    name = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert name in LEVEL, f"{name} has no place in the layers: add it to LAYERS"
    for other in imports(path) - {name, "__version__"}:
        assert LEVEL[other] < LEVEL[name], f"{path.relative_to(SOURCE)} imports {other}, which is not below {name}"


def test_peers_use_nothing_of_ours() -> None:
    for name in STANDALONE:
        assert imports(SOURCE / name) == set()


def test_strategies_do_not_know_the_replica() -> None:
    for path in (SOURCE / "strategies").glob("*.py"):
        assert "replica" not in imports(path), f"{path.name}: strategies see ReplicaLike from types"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_have_one_subject(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 450
    assert ast.get_docstring(ast.parse(text)), "a file says what it is for"


def test_nothing_is_read_from_the_environment() -> None:
    """Except what a launcher sets, in launch/; and what a peer sets for itself."""
    for path in FILES:
        name = str(path.relative_to(SOURCE))
        if name not in STANDALONE and not name.startswith(("launch/", "spark/")):  # Java and Spark are told things that way
            assert "os.environ" not in path.read_text(), name
            assert "getenv" not in path.read_text(), name
