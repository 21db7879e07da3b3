"""Parallel SGD that averages once: every rank trains on its own part of the data, and the weights
are averaged at the end.

    for P in 1 2 3 4 5; do mpirun -n $P python examples/psgd.py; done

With more ranks than cores, add --oversubscribe to mpirun. The loop does what `mpirun -n P paceline
train --strategy psgd --transport mpi` does.
"""

import time

import torch
from torch import nn

import paceline

train, test = paceline.load_data("fashion-mini")
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

pace = paceline.join("psgd", transport="mpi")
model, optimizer, batches = pace.prepare(model, optimizer, train, batch_size=16)
began = time.perf_counter()
for _ in range(4):
    for x, y in batches:
        pace.step(nn.functional.cross_entropy(model(x), y))
seconds = time.perf_counter() - began
pace.finish()  # the one average

model.eval()
with torch.no_grad():
    inputs, labels = test.batch(torch.arange(len(test)))
    accuracy = (model(inputs).argmax(1) == labels).float().mean()
if pace.leads:
    print(
        f"P = {pace.workers}: {seconds:.2f} s, {len(batches)} steps per epoch, accuracy"
        f" {100 * accuracy:.1f}%"
    )
