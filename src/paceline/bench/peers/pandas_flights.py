"""The flights recipe as one writes it in plain pandas: read, join, derive, split, standardise,
one-hot, shards as .npy.

    python pandas_flights.py DATA OUT SHARDS

Prints the seconds of each stage as JSON. It uses nothing of Paceline.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd

NUMBERS = [
    "departs",
    "arrives",
    "temp",
    "dewp",
    "humid",
    "wind_speed",
    "pressure",
    "visib",
    "season",
]
LOGS = ["distance", "precip", "wind_gust", "plane_seats", "age"]
WORDS = ["carrier", "origin", "dest", "month", "weekday", "plane_manufacturer"]


def main(data: Path, out: Path, shards: int) -> None:
    seconds, began = {}, time.perf_counter()

    def lap(stage: str) -> None:
        nonlocal began
        seconds[stage], began = time.perf_counter() - began, time.perf_counter()

    table = pd.read_csv(data / "flights.csv", na_values=["NA"])
    weather = pd.read_csv(data / "weather.csv", na_values=["NA"]).drop(
        columns=["year", "month", "day", "hour"]
    )
    planes = pd.read_csv(data / "planes.csv", na_values=["NA"])[
        ["tailnum", "year", "engines", "seats", "manufacturer"]
    ]
    table = table.merge(weather, on=["origin", "time_hour"], how="left")
    planes = planes.rename(columns={c: f"plane_{c}" for c in planes.columns if c != "tailnum"})
    table = table.merge(planes, on="tailnum", how="left")
    table = table[table.arr_delay.notna()]
    late = (table.arr_delay > 15).to_numpy(np.int64)
    dates = pd.to_datetime(table[["year", "month", "day"]])
    table["departs"] = table.hour + table.minute / 60
    table["arrives"] = table.sched_arr_time // 100 + table.sched_arr_time % 100 / 60
    table["weekday"], table["season"] = dates.dt.weekday + 1, dates.dt.dayofyear
    table["age"] = table.year - table.plane_year
    lap("read")

    days = dates.unique()
    test = dates.isin(days[np.random.default_rng(0).random(len(days)) < 0.2]).to_numpy()
    numbers = table[NUMBERS].astype(np.float64)
    logs = np.log1p(table[LOGS].where(table[LOGS] > -1))
    gone = logs.isna().astype(np.float32)
    gone.columns = [f"{c} is missing" for c in LOGS]
    numbers = (numbers - numbers[~test].mean()) / numbers[~test].std(ddof=0)
    logs = (logs - logs[~test].mean()) / logs[~test].std(ddof=0)
    angle = table.wind_dir * (2 * np.pi / 360)
    cyclic = pd.DataFrame(
        {"sin": np.sin(angle).fillna(0), "cos": np.cos(angle).fillna(0)}, index=table.index
    )
    known = {c: sorted(table.loc[~test, c].dropna().value_counts().index[:150]) for c in WORDS}
    words = [
        pd.get_dummies(pd.Categorical(table[c], categories=known[c]), dtype=np.float32)
        for c in WORDS
    ]
    lap("count")

    parts = [numbers.fillna(0), logs.fillna(0), gone, cyclic]
    inputs = np.concatenate([p.to_numpy(np.float32) for p in (*parts, *words)], axis=1)
    out.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(1).permutation(len(inputs))
    for name, chosen, count in (
        ("train", order[~test[order]], shards),
        ("test", order[test[order]], 1),
    ):
        for number, rows in enumerate(np.array_split(chosen, count)):
            np.save(out / f"{name}-{number}.inputs.npy", inputs[rows])
            np.save(out / f"{name}-{number}.targets.npy", late[rows])
    lap("write")
    print(json.dumps({"rows": len(inputs), "width": inputs.shape[1], "seconds": seconds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
