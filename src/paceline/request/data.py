"""The data of a run: loaded, cut to a share of it, with a validation set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.data.adopt import adopt, adopt_test
from paceline.data.base import Data, Stream, some_of, split_off
from paceline.data.content import split, whole
from paceline.errors import BadRequest
from paceline.registry import Spec, models, sources
from paceline.request.config import Config


def data_of(config: Config) -> Data:
    """Return the data that the options describe."""
    return _validated(_share(_load(config), config.data_share), config)


def _load(config: Config) -> Data:
    # a person's own model knows its classes
    count = is_built_in(config.model)
    parts = whole if config.step is not None else split
    if isinstance(config.data, Spec):
        return adopt(
            sources.build(config.data, data_dir=config.data_dir), str(config.data), count, parts
        )
    if (
        callable(config.data)
        and not hasattr(config.data, "__getitem__")
        and not hasattr(config.data, "__iter__")
    ):
        return adopt(config.data(), count_classes=count, split=parts)
    return adopt(config.data, count_classes=count, split=parts)


def _share(data: Data, share: float) -> Data:
    if share == 1.0:
        return data
    if isinstance(data.train, Stream):
        raise BadRequest("data_share needs samples that can be counted: a stream cannot be cut")
    part = round(share * len(data.train))
    if part < 1:
        raise BadRequest(
            f"data_share={share:g} of {len(data.train)} training samples is none:"
            f" {1 / len(data.train):g} is one"
        )
    return replace(data, train=some_of(data.train, part))


def _validated(data: Data, config: Config) -> Data:
    """The data with a validation set: a share of the training set, or the user's own set."""
    asked = config.validation
    if asked is None:
        return data
    if not isinstance(asked, float):
        return replace(data, validation=adopt_test(asked))
    if isinstance(data.train, Stream):
        raise BadRequest(
            "a share for validation needs samples that can be counted, and a stream cannot be cut:"
            " give validation a data set of its own"
        )
    if config.privacy is not None:
        raise BadRequest(
            "validation rows of a private training set would be evaluated without protection: give"
            " validation a data set of its own"
        )
    part = round(asked * len(data.train))
    if not 0 < part < len(data.train):
        raise BadRequest(
            f"validation={asked:g} of {len(data.train)} training samples is"
            f" {'none' if part == 0 else 'all'}"
        )
    rest, held = split_off(data.train, part)
    return replace(data, train=rest, validation=held)


def is_built_in(model: Any) -> bool:
    return isinstance(model, Spec) and model.name in models
