"""A small table that has everything that can be wrong with one, and a recipe for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from paceline.data.prepare.recipe import Recipe

RECIPE = """
[source]
path = "people.csv"
missing = ["NA", "?"]
comment = "#"
numbers = ["age", "income", "year", "month", "day"]

[[join]]
path = "towns.csv"
numbers = ["size"]
on = ["town"]
take = ["size", "country"]
prefix = "town_"

[derive]
rich = "income > 50 or income == 17"
decade = "age // 10"
rest = "age % 7 / 0.5 - -1"
odd = "when(age % 2 == 1, 'odd', 'even')"
weekday = "weekday(year, month, day)"
per = "income / (age - 40)"

[[numeric]]
columns = ["age", "rest", "per"]
missing = "mean"
flag = true

[[numeric]]
columns = ["town_size"]
transform = "log1p"
missing = "zero"

[[numeric]]
columns = ["month"]
transform = "cyclic"
period = 12

[[categorical]]
columns = ["town", "odd", "decade", "weekday"]
most = 5

[[categorical]]
columns = ["town_country"]
encode = "index"

[target]
column = "rich"

[split]
test = 0.25
"""


def write_table(folder: Path, rows: int = 400, seed: int = 0) -> Path:
    """people.csv and towns.csv with a recipe beside them: blanks, quotes, missing words, bad
    numbers, broken lines.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    towns = ["Aachen", "Bonn", 'Cologne, "the" city', "Dresden", "Ébène", "Fulda", "Nowhere"]
    lines = ["id,age,town,income,year,month,day"]
    ages = [*range(18, 90), "NA", "?", "", "old", "1e1", " 33 "]
    for i in range(rows):
        age = draw.choice(ages)
        income = draw.choice([*range(100), "NA", "17.5", "-3.25", "+4", ".5"])
        town = draw.choice(towns)
        quoted = (
            '"' + town.replace('"', '""') + '"'
            if "," in town
            else draw.choice([town, f" {town} ", f'"{town}"'])
        )
        lines.append(
            f"{i},{age},{quoted},{income},2013,{draw.randint(1, 12)},{draw.randint(1, 31)}"
        )
        if i % 50 == 7:
            lines.append(draw.choice(["", "1,2,3", "a,b,c,d,e,f,g,h,i", "# a remark", "   "]))
    lines += ["7,8", lines[3]]  # one more broken line, and a copy of a row
    (folder / "people.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    known = zip(
        (t.replace('"', '""') for t in towns[:6]),
        (250, 330, 1080, 560, "many", 68),
        "DDDDFD",
        strict=True,
    )
    sizes = "\n".join(f'"{town}",{size},{country}' for town, size, country in known)
    (folder / "towns.csv").write_text(f"town,size,country\n{sizes}\nbroken\n", encoding="utf-8")
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    return recipe


def changed(folder: Path, old: str, new: str, **table: Any) -> Recipe:
    """The recipe with one thing changed."""
    file = write_table(folder, **table)
    assert old in RECIPE
    file.write_text(RECIPE.replace(old, new))
    return Recipe.read(file)
