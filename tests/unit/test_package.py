"""Packages for another interpreter: what a module holds that cannot be imported there."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import BadRequest
from paceline.launch.package import pack, unpack

HELPER = """
import torch

def half(x):
    return x / 2

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        return half(self.layer(x))
"""


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[Any]:
    """A module from a folder that is not on Python's path, as torch.hub imports some."""
    file = tmp_path / "away" / "hub_helper.py"
    file.parent.mkdir()
    file.write_text(HELPER)
    spec = importlib.util.spec_from_file_location("hub_helper", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hub_helper"] = module
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("hub_helper", None)


def test_a_module_that_python_does_not_find_travels_by_value(helper: Any) -> None:
    """scripts.md D13: such a model ended in the traceback of a launcher."""
    torch.manual_seed(0)
    net, x = helper.Net(), torch.ones(1, 3)
    package = pack({"instance": net, "class": helper.Net, "torch's": torch.nn.Linear})
    expected = net(x)
    del sys.modules["hub_helper"]  # as in another interpreter
    content = unpack(package)
    assert torch.equal(content["instance"](x), expected)
    assert content["class"]().layer.out_features == 2
    assert content["torch's"] is torch.nn.Linear
    assert "hub_helper" not in sys.modules


def test_what_can_be_imported_travels_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_helper.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("own_helper")
    package = pack(module.Net)
    assert unpack(package) is module.Net
    (tmp_path / "own_helper.py").unlink()
    importlib.invalidate_caches()
    del sys.modules["own_helper"]
    with pytest.raises(BadRequest, match=r"cannot import .*own_helper.*PYTHONPATH"):
        unpack(package)
