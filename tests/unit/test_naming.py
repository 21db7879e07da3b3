"""The folder of a run that was given none has a name that a person can read."""

import re

import pytest
import torch
from tests.small import make_pairs, small_net
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import paceline
from paceline.request.config import Config
from paceline.request.naming import default_out
from paceline.strategies.allreduce import AllReduce


class Net(nn.Module):
    pass


class Photos(TensorDataset):
    pass


PHOTOS = Photos(torch.zeros(4, 2), torch.zeros(4))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "cnn-mnist-serial-1"),
        ({"model": "mlp:hidden=512x256", "strategy": "local-sgd:every=8", "workers": 2},
         "mlp-mnist-local-sgd-2"),
        ({"model": Net, "data": (make_pairs(4), make_pairs(4)), "workers": 2},
         "Net-tensors-allreduce-2"),
        ({"model": Net(), "data": DataLoader(PHOTOS)}, "Net-Photos-serial-1"),
        ({"data": (DataLoader(Subset(PHOTOS, [0])), None)}, "cnn-Photos-serial-1"),
        ({"model": "mypackage.nets:make_net:depth=3", "data": "mypackage.data:photos"},
         "make_net-photos-serial-1"),
        ({"model": lambda: nn.Linear(2, 3), "data": small_net}, "small_net-serial-1"),
        ({"data": "imagefolder:my photos/2026", "strategy": AllReduce()},
         "cnn-imagefolder-allreduce-1"),
        ({"data": "mypackage:" + "x" * 99}, f"cnn-{'x' * 24}-serial-1"),
    ],
)  # fmt: skip
def test_names(options: dict, wanted: str) -> None:
    config = Config.make(options)
    folder = default_out(config)
    assert re.fullmatch(rf"runs/\d{{8}}-\d{{6}}-{re.escape(wanted)}", str(folder))


def test_a_run_of_ones_own_objects_is_in_such_a_folder(monkeypatch) -> None:
    run = paceline.train(
        model=small_net, data=make_pairs(20), transport="inproc", steps=1, batch_size=4
    )
    assert run.out.name.endswith("-small_net-tensors-serial-1")
    assert paceline.load(run.out).record == run.record
