"""Every snippet of docs/own_loop.md runs, on one worker and on two."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.test_own_code import on_paces
from tests.small import make_pairs, small_net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.run.own_loop import Pace

PAGE = (Path(__file__).parent.parent.parent / "docs" / "own_loop.md").read_text()


def snippets() -> list[str]:
    """The indented blocks that are Python; those of the shell begin with `paceline`."""
    blocks: list[list[str]] = [[]]
    for line in PAGE.splitlines():
        if line.startswith("    ") or (not line and blocks[-1]):
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    code = [textwrap.dedent("\n".join(block)).strip() for block in blocks]
    return [c for c in code if c and not c.startswith("paceline ") and "servers=2" not in c]


def names(pace: Pace) -> dict[str, Any]:
    """What the snippets take for granted: a script's model, optimizer, loaders and losses."""
    torch.manual_seed(3)
    model, generator, critic = small_net(), nn.Linear(3, 6), nn.Linear(6, 1)
    data = TensorDataset(*make_pairs(24))
    pairs = TensorDataset(torch.randn(12, 3), torch.randn(12, 6))

    class Paceline:
        join = staticmethod(lambda strategy, **options: pace)

    return {
        "os": __import__("os"),
        "torch": torch,
        "paceline": Paceline,
        "pace": pace,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "generator": generator,
        "critic": critic,
        "opt_g": torch.optim.Adam(generator.parameters()),
        "opt_d": torch.optim.Adam(critic.parameters()),
        "loader": DataLoader(data, batch_size=4),
        "test_loader": DataLoader(data, batch_size=5),
        "pair_loader": DataLoader(pairs, batch_size=4),
        "loss_fn": nn.functional.cross_entropy,
        "loss_d": lambda critic, real, fake: critic(fake).mean() - critic(real).mean(),
        "loss_g": lambda critic, fake: -critic(fake).mean(),
    }


def test_the_page_has_its_snippets() -> None:
    assert len(snippets()) == 7


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", range(7))
def test_a_snippet_runs(
    number: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = snippets()[number]
    monkeypatch.chdir(tmp_path)

    def body(pace: Pace) -> int:
        known = names(pace)
        if "generator" in code:
            known["loader"] = known["pair_loader"]
        elif "pace.prepare" not in code:
            made = pace.prepare(known["model"], known["optimizer"], known["loader"])
            known["model"], known["optimizer"], known["batches"] = made
        exec(compile(code, "docs/own_loop.md", "exec"), known)
        pace.finish()
        return pace.steps

    steps = on_paces(workers, body)
    assert len(set(steps)) == 1
    assert steps[0] > 0 or "evaluation" in code
    if "pace.load" in code:  # the second time it loads, and has nothing left to do
        assert on_paces(workers, body) == steps


def test_the_calls_of_the_page_exist() -> None:
    import re

    for name in set(re.findall(r"`pace\.(\w+)", PAGE)):
        assert hasattr(Pace, name) or name == "local_rank", name
    assert inspectable(paceline.Pace)


def test_the_options_for_those_who_come_from_lightning_exist() -> None:
    import inspect
    import re

    rows = PAGE.split("| Lightning |")[1].split("\n\n")[0].splitlines()[2:]
    ours = [name for row in rows for name in re.findall(r"(\w+)=", row.split("|")[2])]
    assert len(ours) > 10
    assert set(ours) <= inspect.signature(paceline.train).parameters.keys()


def inspectable(kind: type) -> bool:
    """Every public method is documented."""
    return all(
        getattr(kind, n).__doc__
        for n in dir(kind)
        if not n.startswith("_") and callable(getattr(kind, n))
    )
