"""A trial is a function of its number: what is run, and what strikes whom, where and when.

A draw that cannot be run is mapped to the nearest one that can, and `mapped` says how.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

STEPS = 24
CHECKPOINT_EVERY, EVALUATE_EVERY = 5, 6
DEADLINE_S = 2.0
LOST_S = 6.0  # a host that has not answered for so long is lost


@dataclass(frozen=True)
class Setting:
    """A strategy with its options, a codec, servers."""

    strategy: str
    codec: str = "none"
    servers: int = 0
    overlap: bool = False
    most_workers: int = 4

    @property
    def name(self) -> str:
        more = f", {self.codec}" if self.codec != "none" else ""
        more += ", 2 servers" if self.servers > 1 else ""
        return f"{self.strategy}{more}{', overlap' if self.overlap else ''}"

    @property
    def kind(self) -> str:
        return self.strategy.partition(":")[0]

    @property
    def survives(self) -> bool:
        """The other workers go on when a worker, except the first, has died."""
        return self.kind == "gossip" or self.strategy == "ps:consistency=async"

    @property
    def exact(self) -> bool:
        """A resumed run ends with the weights of an unbroken one."""
        # collective=auto measures at every start which collective adds up the numbers, and ddp
        # orders its buckets anew.
        return self.strategy not in (
            "allreduce", "ddp", "hogwild", "ps:consistency=ssp", "ps:consistency=async",
            "gossip:mode=async",
        )  # fmt: skip

    @property
    def in_step(self) -> bool:
        """No worker leaves an exchange before all have entered it."""
        apart = ("hogwild", "ps:consistency=ssp", "ps:consistency=async", "gossip:mode=async")
        return self.strategy not in apart and self.kind not in ("psgd", "serial")


SETTINGS = (
    Setting("serial", most_workers=1),
    Setting("allreduce"),
    Setting("allreduce:collective=ring"),
    Setting("allreduce:collective=native", overlap=True),
    Setting("allreduce:collective=ring", "int8:feedback=true"),
    Setting("allreduce:collective=ring", "topk:ratio=0.1"),
    Setting("allreduce:collective=native", "powersgd"),
    Setting("allreduce:collective=ring", "qsgd"),
    Setting("ring-reduce"),
    Setting("stepwise"),
    Setting("local-sgd:every=4,collective=native"),
    Setting("local-sgd:every=4,collective=ring", "int8:feedback=true"),
    Setting("diloco:every=5,collective=ring"),
    Setting("psgd"),
    Setting("hogwild"),
    Setting("ps", servers=1),
    Setting("ps", "topk:ratio=0.1", servers=2, most_workers=3),
    Setting("ps:consistency=ssp", servers=1),
    Setting("ps:consistency=async", servers=1),
    Setting("gossip"),
    Setting("gossip", "int8"),
    Setting("gossip:mode=async"),
    Setting("ddp"),
)
FAULTS = ("kill", "stop", "segv", "term", "memory", "gil", "cut", "link")
TARGETS = {"rank": 56, "server": 12, "launcher": 20, "own rank": 7, "own launcher": 5}
POINTS = (
    "connect", "set up", "compute", "exchange", "in exchange", "evaluate", "save", "in save",
    "finish", "in finish",
)  # fmt: skip
# A launcher has no peers and no link: what would happen to it instead.
OF_LAUNCHERS = {"memory": "kill", "cut": "hup", "link": "int"}
PAUSES = ("stop", "gil")  # they end by themselves after a while, or by --give-up-s


@dataclass(frozen=True)
class Trial:
    number: int
    setting: Setting
    transport: str
    workers: int
    fault: str  # kill, stop, segv, term, memory, gil, cut, link; a launcher's: int, hup as well
    target: str
    rank: int  # the rank that is struck, or whose point the launcher is struck at
    point: str
    step: int
    pause_s: float  # after so long the fault ends by itself; 0: never
    give_up_s: float | None
    mapped: list[str] = field(default_factory=list)

    @property
    def own(self) -> bool:
        """It is a person's own loop under `paceline launch`."""
        return self.target.startswith("own")

    @property
    def strikes_launcher(self) -> bool:
        return self.target.endswith("launcher")

    @property
    def serves(self) -> bool:
        return self.rank >= self.workers

    @property
    def ranks(self) -> int:
        return self.workers + self.setting.servers

    @property
    def testbed(self) -> bool:
        return self.fault == "link"

    def described(self) -> dict[str, Any]:
        return {**asdict(self), "setting": self.setting.name}

    def __str__(self) -> str:
        ends = f", for {self.pause_s:g} s" if self.pause_s else ""
        ends += f", --give-up-s {self.give_up_s:g}" if self.give_up_s else ""
        whom = f"{self.target} (rank {self.rank})"
        return (
            f"{self.number}: {self.setting.name} on {self.transport}, {self.workers} workers:"
            f" {self.fault} of {whom} at {self.point!r}, step {self.step}{ends}"
        )


@cache
def _order(what: str, block: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{what} {block}").shuffle(order)
    return order


def _dealt(what: str, number: int, among: tuple[Any, ...]) -> Any:
    """Deal out all of `among` in every block of numbers, in an order of its own."""
    block, place = divmod(number, len(among))
    return among[_order(what, block, len(among))[place]]


def draw(number: int, root: bool = True, own_gives_up: bool = True) -> Trial:
    """Return the trial of a number. `root`: testbeds can be built."""
    dice = random.Random(f"trial {number}")
    setting: Setting = _dealt("setting", number, SETTINGS)
    target = dice.choices(list(TARGETS), list(TARGETS.values()))[0]
    workers = min(dice.randint(2, 4), setting.most_workers)
    over_mpi = number % 10 == 9
    trial = Trial(
        number,
        setting,
        "mpi" if over_mpi else dice.choice(("shm", "gloo")),
        workers,
        _dealt("fault", number, FAULTS),
        target,
        dice.randrange(workers),
        _dealt("point", number, POINTS),
        dice.randint(3, 19),
        0.0,
        None,
    )
    return _possible(trial, dice, root, own_gives_up)


def _possible(trial: Trial, dice: random.Random, root: bool, own_gives_up: bool) -> Trial:
    mapped: list[str] = []

    def change(why: str, **changes: Any) -> None:
        nonlocal trial
        mapped.append(why)
        trial = replace(trial, **changes)

    setting = trial.setting
    if trial.target == "server" and not setting.servers:
        change("no server: a worker", target="rank")
    if trial.target == "rank" and setting.servers and dice.random() < 0.4:
        change("a worker: a server, so that half of ps's trials strike one", target="server")
    if setting.kind == "serial" and trial.target == "own rank":
        change("serial has one rank: paceline train", target="rank")
    if setting.kind == "serial" and trial.target == "own launcher":
        change("serial has one rank: paceline train", target="launcher")
    if trial.own and trial.transport == "mpi":
        change("mpi under paceline launch: paceline train", target=trial.target.split()[1])
    if trial.target == "server":
        trial = replace(trial, rank=trial.workers + dice.randrange(setting.servers))
    if setting.kind == "hogwild" and trial.transport == "gloo":
        change("hogwild needs shared memory: shm", transport="shm")
    if setting.kind == "hogwild" and trial.transport == "mpi":
        setting = Setting("psgd")
        change("hogwild needs shared memory: psgd", setting=setting)
    if trial.strikes_launcher and trial.fault in OF_LAUNCHERS:
        instead = OF_LAUNCHERS[trial.fault]
        change(f"{trial.fault} of a launcher: {instead}", fault=instead)
    if trial.own and trial.strikes_launcher and trial.fault == "gil":
        change("the GIL of paceline launch, which imports no plugin: stop", fault="stop")
    if trial.fault == "link":
        if not root:
            change("a testbed needs root: cut", fault="cut")
        elif trial.own or setting.kind in ("hogwild", "serial"):
            change("no testbed for this: cut", fault="cut")
        elif trial.transport == "shm":
            change("memory is not shared between hosts: gloo", transport="gloo")
    if setting.kind == "serial" and trial.fault == "cut":
        change("one rank has no connections: segv", fault="segv")
    if trial.target == "server" and trial.point not in ("connect", "set up", "in exchange"):
        change(f"a server does not {trial.point}: in exchange", point="in exchange")
    return replace(_timed(trial, dice, own_gives_up, mapped), mapped=mapped)


def _timed(trial: Trial, dice: random.Random, own_gives_up: bool, mapped: list[str]) -> Trial:
    """Choose how a fault ends that ends nothing."""
    pause_s, give_up_s = round(dice.uniform(3.5, 5.0), 1), float(dice.randint(8, 12))
    ends = dice.random() < 0.5
    if trial.fault == "link":
        return replace(trial, pause_s=0.0 if ends else 2.5, give_up_s=None)
    if trial.fault not in PAUSES:
        return trial
    if trial.strikes_launcher:
        return replace(trial, pause_s=pause_s)
    alone = trial.ranks == 1 or (trial.own and not own_gives_up)
    if ends and alone:
        mapped.append("nothing gives up a wait for it: it ends by itself")
    if ends and not alone:
        return replace(trial, give_up_s=give_up_s)
    return replace(trial, pause_s=pause_s)
