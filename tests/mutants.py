"""Small mistakes, made one at a time, to see whether the tests notice.

    python tests/mutants.py                       20 mutants of this checkout
    python tests/mutants.py --against CHECKOUT    the same in another checkout, with its own tests

A mutant changes one operator or number in one function: `<` to `<=`, `+` to `-`, `and` to `or`, 1
to 2, `min` to `max`. The seed chooses the places, at least two in each area; with `--against`,
among functions that both checkouts have, without those of `SAME_RESULT`. The tests of the area run
with `-x`; a mutant is killed when they fail. Not a test itself: it takes minutes (`make mutants`).
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST_S = 600


@dataclass(frozen=True)
class Area:
    """Files in which mistakes are made (globs below src/paceline), and the tests that should
    notice.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]


AREAS = {
    "schedules": Area(
        ("collectives/schedule.py", "collectives/algorithms/*.py", "collectives/*.py"),
        ("unit/test_schedules.py", "unit/test_operations.py", "unit/test_cost.py"),
    ),
    "shards": Area(
        ("data/shards.py", "data/windows.py"),
        (
            "unit/test_data.py",
            "unit/test_shards.py",
            "unit/test_windows.py",
            "unit/test_balance.py",
        ),
    ),
    "codecs": Area(("codecs/*.py", "codecs/packing/*.py"), ("unit/test_codecs.py",)),
    "clipping": Area(
        ("privacy/clip*.py", "privacy/layers.py", "privacy/convolution.py", "privacy/gradient.py"),
        ("unit/test_clipping.py", "unit/test_privacy.py"),
    ),
    "accounting": Area(
        ("privacy/accounting.py", "privacy/ledger.py", "privacy/plan.py", "protection.py"),
        ("unit/test_privacy.py", "contract/test_private_runs.py"),
    ),
    "resume": Area(
        ("run/state.py", "snapshot.py", "record/checkpoint*.py", "checkpoint.py"),
        (
            "unit/test_checkpoint.py",
            "unit/test_balance.py",
            "contract/test_strategies.py",
            "contract/test_regressions.py",
        ),
    ),
    "verdicts": Area(
        (
            "report/noise.py",
            "report/score.py",
            "report/answer.py",
            "report/accuracy.py",
            "report/commentary/accuracy.py",
        ),
        ("unit/test_report_truth.py", "unit/test_commentary.py"),
    ),
}

# Functions that choose the quicker of two ways to the same result, or round for show: a mistake in
# them changes no result, so no test of results can notice it.
SAME_RESULT = {
    "Auto._measure", "Convolution.book", "Convolution._lengths", "Convolution._by_places",
    "Convolution._most", "pack_bits", "unpack_bits", "largest", "_rounded_up", "_as_matrix",
}  # fmt: skip

# The same, found later: they are left out after the draw, so that the other mutants stay.
SAME_RESULT_TOO = {"_guess", "slices", "_can_be_saved"}

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}  # fmt: skip
OPERATIONS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def _compare(node: ast.Compare) -> None:
    node.ops[0] = COMPARISONS[type(node.ops[0])]()


def _operate(node: ast.BinOp) -> None:
    node.op = OPERATIONS[type(node.op)]()


def _combine(node: ast.BoolOp) -> None:
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()


def _count(node: ast.Constant) -> None:
    node.value = int(node.value) + 1  # type: ignore[call-overload]


def _rename(node: ast.Name) -> None:
    node.id = NAMES[node.id]


def change_of(node: ast.AST) -> Callable[..., None] | None:
    """Return what turns a node into a mistake, or None where it cannot be one."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        return _compare
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return _operate
    if isinstance(node, ast.BoolOp):
        return _combine
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _count
    if isinstance(node, ast.Name) and node.id in NAMES:
        return _rename
    return None


def sites(function: ast.AST) -> Iterator[ast.AST]:
    """Every node that can become a mistake, but for messages, types and defaults."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments)):
            continue
        if isinstance(child, ast.AnnAssign):
            if child.value is not None:
                yield from _with_own(child.value)
            continue
        yield from _with_own(child)


def _with_own(node: ast.AST) -> Iterator[ast.AST]:
    if change_of(node) is not None:
        yield node
    yield from sites(node)


@dataclass(frozen=True)
class Function:
    """A function of a checkout: where it stands, and its code without its docstring."""

    path: Path
    name: str  # Class.method
    code: ast.FunctionDef

    @property
    def dumped(self) -> str:
        return ast.dump(ast.Module(_without_docstring(self.code).body, []))


def _without_docstring(code: ast.FunctionDef) -> ast.FunctionDef:
    bare = copy.deepcopy(code)
    bare.returns, bare.decorator_list = None, []
    if ast.get_docstring(bare) is not None:
        bare.body = bare.body[1:] or [ast.Pass()]
    return bare


def functions(root: Path, area: Area) -> dict[str, Function]:
    found: dict[str, Function] = {}
    source = root / "src" / "paceline"
    for path in sorted({p for pattern in area.files for p in source.glob(pattern)}):
        if path.name == "draw.py":  # pictures
            continue
        for node in ast.parse(path.read_text()).body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for code in inside:
                if isinstance(code, ast.FunctionDef) and f"{owner}{code.name}" not in SAME_RESULT:
                    found[f"{owner}{code.name}"] = Function(path, f"{owner}{code.name}", code)
    return found


@dataclass(frozen=True)
class Mutant:
    area: str
    function: str
    site: int  # which of the function's sites

    def write(self, root: Path) -> str:
        """Make the mistake in a checkout's files. Returns it in words."""
        function = functions(root, AREAS[self.area])[self.function]
        code = copy.deepcopy(function.code)
        node = list(sites(code))[self.site]
        before, line = ast.unparse(node), getattr(node, "lineno", 0)
        change = change_of(node)
        assert change is not None
        change(node)
        lines = function.path.read_text().splitlines()
        first = min([code.lineno, *(d.lineno for d in code.decorator_list)]) - 1
        indent = " " * code.col_offset
        new = [indent + text for text in ast.unparse(code).splitlines()]
        lines[first : code.end_lineno] = new
        function.path.write_text("\n".join(lines) + "\n")
        where = function.path.relative_to(root / "src" / "paceline")
        return f"{where}:{line} {self.function}: {before}  ->  {ast.unparse(node)}"


def chosen(roots: list[Path], count: int, seed: int) -> list[Mutant]:
    """Mistakes that can be made in all checkouts, spread over the areas."""
    chance = random.Random(seed)
    queues = {}
    for name, area in AREAS.items():
        first, *others = (functions(root, area) for root in roots)
        common = [
            f for f in first.values()
            if all(f.name in o and o[f.name].dumped == f.dumped for o in others)
        ]  # fmt: skip
        queue = [
            Mutant(name, f.name, i)
            for f in sorted(common, key=lambda f: f.name)
            for i in range(len(list(sites(f.code))))
        ]
        chance.shuffle(queue)
        kept = [m for m in queue if m.function not in SAME_RESULT_TOO]
        queues[name] = _one_per_function(kept)
    picked: list[Mutant] = []
    while len(picked) < count:
        for queue in queues.values():
            if queue and len(picked) < count:
                picked.append(queue.pop(0))
        if not any(queues.values()):
            break
    return sorted(picked, key=lambda m: list(AREAS).index(m.area))


def _one_per_function(queue: list[Mutant]) -> list[Mutant]:
    seen: set[str] = set()
    return [m for m in queue if not (m.function in seen or seen.add(m.function))]  # type: ignore[func-returns-value]


def killed(root: Path, mutant: Mutant) -> tuple[bool, str, float]:
    """Whether the tests of a checkout notice the mistake; the mistake in words; the seconds it
    took.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copied = Path(folder) / "checkout"
        shutil.copytree(
            root, copied, ignore=shutil.ignore_patterns(".git", ".venv", "runs", ".*_cache")
        )
        said = mutant.write(copied)
        tests = [f"tests/{t}" for t in AREAS[mutant.area].tests if (copied / "tests" / t).is_file()]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            *tests,
        ]
        began = time.monotonic()
        try:
            environment = {**os.environ, "PYTHONPATH": str(copied / "src")}
            result = subprocess.run(
                command,
                cwd=copied,
                env=environment,
                capture_output=True,
                timeout=LONGEST_S,
                check=False,
            )
            code = result.returncode
        except subprocess.TimeoutExpired:
            code = 1  # a test that hangs has noticed
        return code != 0, said, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--against", type=Path, help="another checkout, whose tests get the same mistakes"
    )
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    roots = [ROOT, *([given.against.resolve()] if given.against else [])]
    mutants = chosen(roots, given.count, given.seed)
    names = ["here", "there"][: len(roots)]
    print(f"{'area':11} {'  '.join(f'{n:>15}' for n in names)}  mistake")
    totals = [0] * len(roots)
    for mutant in mutants:
        results = [killed(root, mutant) for root in roots]
        totals = [t + r[0] for t, r in zip(totals, results, strict=True)]
        verdicts = [f"{'killed' if r[0] else 'SURVIVED':>8} {r[2]:4.0f} s" for r in results]
        print(
            f"{mutant.area:11} {'  '.join(f'{v:>15}' for v in verdicts)}  {results[0][1]}",
            flush=True,
        )
    print(
        ", ".join(f"{n}: {t} of {len(mutants)} killed" for n, t in zip(names, totals, strict=True))
    )


if __name__ == "__main__":
    main()
