"""Hogwild: four workers update one set of weights in shared memory without locks. The script prints
how often their updates overlapped.

python examples/hogwild.py
"""

import paceline

run = paceline.train(
    model="cnn",
    data="fashion-mini",
    strategy="hogwild",
    workers=4,
    epochs=4,
    batch_size=16,
    lr=0.01,
    progress=False,
)
print(f"accuracy {100 * run.test_accuracy:.1f}%, {run.samples_per_s:,.0f} samples/s")
for worker in run.record["workers"]:
    stale, overlapped = worker["staleness_mean"], worker["overlap_rate"]
    print(
        f"worker {worker['rank']}: {stale:.2f} updates of others per step, {100 * overlapped:.0f}%"
        " of its own overlapped"
    )
