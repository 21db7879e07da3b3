"""Adult: a table of people from the 1994 census, and whether they earn more than $50,000 a year.

The encoding uses what is published about the table, never its rows: the words that a column may
have, and round numbers for the mean and the spread of the others. Means and vocabularies that are
computed from the rows would be a release of private data without noise. The survey's weight
(`fnlwgt`) and `education` (a text form of `education-num`) are left out.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import torch
from torch import Tensor

from paceline.common.places import find
from paceline.data.base import Data, TensorSamples
from paceline.errors import DataCorrupt
from paceline.registry import sources

FILES = ("adult.data", "adult.test")
COLUMNS = 15
UNKNOWN = "?"

# Middle and spread of age, years of education, and hours per week.
NUMBERS = {0: (40.0, 15.0), 4: (10.0, 3.0), 12: (40.0, 12.0)}
AMOUNTS = {10: 10.0, 11: 10.0}  # capital gain and loss: log(1 + x) / 10
WORDS = {
    1: (
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay"
        " Never-worked"
    ),
    5: (
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent"
        " Married-AF-spouse"
    ),
    6: (
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty"
        " Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving"
        " Priv-house-serv Protective-serv Armed-Forces"
    ),
    7: "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    8: "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    9: "Female Male",
    13: (
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India"
        " Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam"
        " Mexico Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia"
        " Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru"
        " Hong Holand-Netherlands"
    ),
}
LABELS = {"<=50K": 0, ">50K": 1}


@sources.register("adult")
def adult(data_dir: str | None) -> Data:
    """People of the 1994 census, 32,561 + 16,281 rows of 88 numbers: more than $50,000 a year?"""
    folder = find("adult", data_dir, ("adult",), FILES)
    train, test = (TensorSamples(*read(folder / name)) for name in FILES)
    return Data("adult", train, test, tuple(train.inputs.shape[1:]), 2)


def read(path: Path) -> tuple[Tensor, Tensor]:
    places = {
        column: {word: i for i, word in enumerate(words.split())} for column, words in WORDS.items()
    }
    inputs, labels = [], []
    try:
        with path.open(newline="") as file:
            for number, row in enumerate(csv.reader(file, skipinitialspace=True), start=1):
                if not row or row[0].startswith("|"):
                    continue
                if len(row) != COLUMNS:
                    raise DataCorrupt(f"{path}, line {number}: {len(row)} columns, not {COLUMNS}")
                inputs.append(_numbers(row, places))
                labels.append(LABELS[row[-1].rstrip(".")])
    except (KeyError, ValueError) as error:
        raise DataCorrupt(
            f"{path}, line {number}: this column may not have the value {error}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataCorrupt(f"{path} cannot be read: {error}") from None
    if not inputs:
        raise DataCorrupt(f"{path} has no rows")
    return torch.tensor(inputs), torch.tensor(labels)


def _numbers(row: list[str], places: dict[int, dict[str, int]]) -> list[float]:
    found = [(float(row[column]) - middle) / spread for column, (middle, spread) in NUMBERS.items()]
    found += [math.log1p(float(row[column])) / scale for column, scale in AMOUNTS.items()]
    for column, words in places.items():
        mark = [0.0] * len(words)
        if row[column] != UNKNOWN:
            mark[words[row[column]]] = 1.0
        found += mark
    return found
