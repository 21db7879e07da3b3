"""What a prediction costs against the number of workers: seconds on one core, and memory.

    python benchmarks/plan_cost.py
    python benchmarks/plan_cost.py --workers 64,512,4096

Each prediction runs in a process of its own, with one thread, for a model of 11 million numbers on
links of 1 Gbit/s. Start-up is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

STRATEGIES = (
    "allreduce:collective=ring", "allreduce:collective=tree", "allreduce:collective=hierarchical",
    "allreduce:collective=halving-doubling", "ring-reduce", "stepwise", "ps",
    "ps:consistency=async", "ps:consistency=ssp", "local-sgd", "diloco", "gossip", "psgd",
)  # fmt: skip


def one(strategy: str, workers: int) -> None:
    """Predict one setting in this process; print its seconds and the peak memory."""
    import torch

    torch.set_num_threads(1)
    from paceline.planning.cluster import Cluster
    from paceline.planning.predict import Setting, Worker, predict
    from paceline.registry import strategies
    from paceline.transport.virtual import Link
    from paceline.types import Layout, Slot

    layout = Layout((Slot("w", (11_000_000,), (1,), 0, 11_000_000, 0),))
    worker = Worker(layout, [0.1, 0.12, 0.2], 64)
    made = strategies.build(strategy)
    servers = 4 if made.traits.serves == "ranks" else 0
    began = time.process_time()
    predict(Setting(made, "none", workers, servers), worker, Cluster(Link(50e-6, 8 / 1e9)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"cpu_s": time.process_time() - began, "peak_bytes": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", default="16,64,256,1024,4096", help="numbers of workers")
    parser.add_argument("--one", nargs=2, metavar=("STRATEGY", "WORKERS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.one[0], int(given.one[1]))
        return
    counts = [int(count) for count in given.workers.split(",")]
    print(f"| strategy | {' | '.join(f'P = {count:,}' for count in counts)} | most memory |")
    print(f"|---|{'---|' * (len(counts) + 1)}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for strategy in STRATEGIES:
        cells, most = [], 0.0
        for count in counts:
            words = [sys.executable, __file__, "--one", strategy, str(count)]
            done = subprocess.run(
                words, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                cells.append(done.stderr.strip().splitlines()[-1][:40])
                continue
            found = json.loads(done.stdout)
            cells.append(f"{found['cpu_s']:.2f} s")
            most = max(most, found["peak_bytes"])
        print(f"| `{strategy}` | {' | '.join(cells)} | {most / 1e9:.2f} GB |", flush=True)


if __name__ == "__main__":
    main()
