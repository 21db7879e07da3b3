"""Your own training loop, synchronised by any strategy.

paceline launch -n 2 examples/own_loop.py            also: torchrun, mpirun, or alone (one worker)
paceline launch -n 3 examples/own_loop.py ps         the last rank is the server
"""

import sys

import torch
from torch import nn

import paceline

train, test = paceline.load_data("fashion-mini")
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)

with paceline.join(sys.argv[1] if len(sys.argv) > 1 else "allreduce") as pace:
    model, optimizer, batches = pace.prepare(model, optimizer, train, batch_size=32)
    for _ in range(3):
        for x, y in batches:
            pace.step(nn.functional.cross_entropy(model(x), y), clip_norm=5.0)
        scheduler.step()

model.eval()
with torch.no_grad():
    inputs, labels = test.batch(torch.arange(len(test)))
    accuracy = (model(inputs).argmax(1) == labels).float().mean()
if pace.leads:
    print(f"{pace.workers} worker(s), {pace.steps} steps each: accuracy {100 * accuracy:.1f}%")
