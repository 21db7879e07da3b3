"""A person's own loop for `paceline launch -n N own_loop.py SETTINGS.json`, with a fault in it."""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path

import plugin
import torch
from torch import nn

import paceline
from paceline.registry import transports

settings = json.loads(Path(sys.argv[1]).read_text())
rank = int(os.environ["RANK"])
plan = Path(settings["plan"]) if settings["plan"] else None
striker = None
if plan is not None:
    striker = plugin.Striker(
        plugin.Plan(**json.loads(plan.read_text())), plan.with_suffix(".struck")
    )


def at(point: str, step: int) -> None:
    if striker is not None:
        striker.at(point, step, rank)


# The plugin's wrapper goes around the transport that `join` makes.
kind = transports.entry(settings["transport"]).make
connect = kind.connect


def connect_watched(rendezvous):
    made = connect(rendezvous)
    watched = striker is not None and rendezvous.rank == striker.plan.rank
    return plugin.Watched(made, striker) if watched else made


kind.connect = connect_watched

at("connect", 0)
torch.set_num_threads(1)
torch.manual_seed(0)
more = {"give_up_s": settings["give_up_s"]}
known = inspect.signature(paceline.join).parameters
pace = paceline.join(
    settings["strategy"],
    codec=settings["codec"],
    transport=settings["transport"],
    servers=settings["servers"],
    deadline_s=settings["deadline_s"],
    out=settings["out"],
    resume=settings["resume"],
    **{name: value for name, value in more.items() if name in known},
)
at("set up", 0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
x = torch.randn(96, 6)
data = (x, x[:, :3].argmax(1))
early = settings["load_first"]  # some strategies load before they prepare
saved = Path(settings["out"]) / "checkpoints"
goes_on = settings["resume"] and any(saved.glob("step-*"))
if goes_on and early:
    pace.load(settings["out"])
model, optimizer, batches = pace.prepare(model, optimizer, data, batch_size=4)
if goes_on and not early:
    pace.load(settings["out"])
while pace.steps < settings["steps"]:
    for inputs, targets in batches:
        at("compute", pace.steps + 1)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        at("exchange", pace.steps + 1)
        pace.step(loss)
        if pace.steps % 6 == 0:
            at("evaluate", pace.steps)
            with pace.consensus(), torch.no_grad():
                model(x)
        if pace.steps % 5 == 0:
            at("save", pace.steps)
            pace.save(settings["out"])
        if pace.steps >= settings["steps"]:
            break
at("finish", pace.steps)
pace.finish()
state = pace.state_dict()
if pace.leads:
    torch.save(state, settings["weights"])
