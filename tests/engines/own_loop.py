"""A loop of a user's own with a record in a folder: `python own_loop.py FOLDER`."""

import sys

import torch

import paceline

pace = paceline.join("allreduce:collective=ring", out=sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(96, 6)
data = (x, x[:, :3].argmax(1))
model, optimizer, batches = pace.prepare(model, optimizer, data, batch_size=4)
for inputs, targets in batches:
    pace.step(torch.nn.functional.cross_entropy(model(inputs), targets))
pace.finish()
# One write, so that lines of several ranks are not mixed.
sys.stdout.write(f"rank {pace.rank}\n")
