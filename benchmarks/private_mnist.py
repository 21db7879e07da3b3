"""Measure the accuracy of private training on MNIST at epsilon 1.2 and 3 (delta 1e-5), with one
worker and with four synchronous workers, three seeds each.

    python benchmarks/private_mnist.py [--seeds 3] [--json FILE]

The model is `cnn-tanh` (26,010 parameters: two convolutions, two fully connected layers, tanh;
after Papernot et al., 2021). With trust=curator the sum over four workers carries the noise of one
worker; with trust=peers each worker adds that noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from typing import Any

import paceline

# By epsilon: the accuracy to reach, and the options.
SETTINGS: dict[float, tuple[float, dict[str, Any]]] = {
    1.2: (0.95, {"global_batch_size": 1024, "lr": 1.0, "epochs": 7}),
    3.0: (0.97, {"global_batch_size": 512, "lr": 1.0, "epochs": 12}),
}
CONTENDERS: dict[str, dict[str, Any]] = {
    "serial": {"strategy": "serial"},
    "4 workers, trust=curator": {"strategy": "allreduce", "workers": 4, "trust": "curator"},
    "4 workers, trust=peers": {"strategy": "allreduce", "workers": 4, "trust": "peers"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for epsilon, (goal, options) in SETTINGS.items():
            for name, line in CONTENDERS.items():
                trust = line.get("trust", "peers")
                accuracies, spent = [], []
                for seed in range(asked.seeds):
                    run = paceline.train(
                        model="cnn-tanh",
                        data="mnist",
                        threads=1,
                        seed=seed,
                        evaluate_every="100epochs",
                        progress=False,
                        privacy=f"epsilon={epsilon},delta=1e-5,clip=0.1,trust={trust}",
                        out=f"{folder}/{epsilon}-{name}-{seed}",
                        **options,
                        **{k: v for k, v in line.items() if k != "trust"},
                    )
                    accuracies.append(run.test_accuracy)
                    spent.append(run.record["privacy"]["epsilon"])
                each = " ".join(f"{100 * a:.2f}" for a in accuracies)
                mean = 100 * statistics.fmean(accuracies)
                said = (
                    f"epsilon {max(spent):.3f}  {name:26} {each}  mean {mean:.2f}%  (asked:"
                    f" {100 * goal:g}%)"
                )
                print(said, flush=True)
                found.append(
                    {"epsilon": max(spent), "line": name, "accuracies": accuracies, "goal": goal}
                )
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
