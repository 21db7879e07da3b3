"""Options: file < flags, the same names everywhere, checked once."""

import math
from datetime import date
from pathlib import Path

import pytest

from paceline.common.files import read_toml
from paceline.common.intervals import due
from paceline.errors import BadRequest, UnknownName
from paceline.request.config import Config
from paceline.request.settings import apply_settings


def test_defaults_are_the_promised_ones() -> None:
    config = Config.make({})
    assert (config.lr, config.workers, str(config.strategy)) == (0.01, 1, "serial")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workers": 0}, "1 or more"),
        ({"workers": "two"}, "not a whole number"),
        ({"batch_size": -1}, "1 or more"),
        ({"batch_size": "x"}, "not a whole number"),
        ({"batch_size": 8, "global_batch_size": 16}, "not both"),
        ({"lr": -0.1}, "between 0 and 1e"),
        ({"lr": "nan"}, "between 0 and 1e"),
        ({"lr": 1e300}, r"lr=1e\+300: it must be between 0 and 1e\+30"),
        ({"weight_decay": 1e300}, "between 0 and 1e"),
        ({"deadline_s": 1e300}, "between 0.001 and"),
        ({"momentum": 2}, "less than 1"),
        ({"momentum": 1}, "less than 1"),
        ({"transport": math.inf}, "transport=inf is not a name: write it as text"),
        ({"transport": ["nosuch"]}, "is not a name"),
        ({"codec": date(1979, 5, 27)}, 'is not a name: write it as text, codec = "none"'),
        ({"codec": 7}, "codec=7 is not a name"),
        ({"lr_schedule": 3}, "lr_schedule=3 is not a name"),
        ({"data": [None]}, "is not a name"),
        ({"batch_size": []}, "a number of samples"),
        ({"global_batch_size": []}, "a number of samples"),
        ({"workers": 10**400}, "is not a whole number"),
        ({"data_dir": "a" * 3000}, r"data_dir='aaa.*\(3,002 letters\) is not a path"),
        ({"out": "a\0b"}, "is not a path"),
        ({"epochs": 0}, "1 or more"),
        ({"until_accuracy": 97}, "between 0 and 1"),
        ({"evaluate_every": "often"}, "number of steps"),
        ({"checkpoint_every": "0"}, "number of steps"),
        ({"shard": "round"}, "global, static"),
        ({"partition": "by-label", "shard": "global"}, "needs shard=static"),
        ({"memory_format": "fast"}, "channels_last"),
        ({"threads": 0}, "1 or more"),
        ({"seed": 2**70}, "64 bits"),
    ],
)
def test_bad_values(values: dict, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Config.make(values)


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'workers'"):
        Config.make({"worker": 2})


def test_set_reaches_into_choices() -> None:
    values = apply_settings({"strategy": "allreduce"}, ["strategy.collective=native", "lr=0.5"])
    config = Config.make(values)
    assert str(config.strategy) == "allreduce:collective=native"
    assert config.lr == 0.5
    for bad in ("nosuch=1", "lr.x=1", "lr"):
        with pytest.raises(BadRequest):
            apply_settings({}, [bad])


def test_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "mlp"\nworkers = 2\n[strategy]\nname = "allreduce"\ncollective = "native"\n'
    )
    config = Config.make({**read_toml(file), "workers": 3})
    assert (str(config.strategy), config.workers) == ("allreduce:collective=native", 3)
    file.write_text("a = = 1")
    with pytest.raises(BadRequest, match="not valid TOML"):
        read_toml(file)
    with pytest.raises(BadRequest, match="does not exist"):
        read_toml(tmp_path / "none.toml")


def test_what_is_saved_can_be_read_back() -> None:
    config = Config.make(
        {"strategy": "allreduce:collective=native", "batch_size": "4,2", "workers": 2, "lr": 0.3}
    )
    again = Config.make({k: v for k, v in config.described().items() if v is not None})
    assert again.described() == config.described()
    assert again.batch_size == config.batch_size


@pytest.mark.parametrize(
    ("interval", "step", "epoch", "ended", "expected"),
    [
        ("10", 20, 1, False, True),
        ("10", 21, 1, True, False),
        ("epoch", 7, 1, True, True),
        ("epoch", 7, 1, False, False),
        ("2epochs", 9, 1, True, False),
        ("2epochs", 9, 2, True, True),
        (None, 10, 1, True, False),
    ],
)
def test_due(interval: str | None, step: int, epoch: int, ended: bool, expected: bool) -> None:
    assert due(interval, step, epoch, ended) is expected
