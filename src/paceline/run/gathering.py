"""What all workers do together between their steps, also when one of them dies meanwhile.

An evaluation, a checkpoint and the final average are made by all workers in one group. Where a
strategy survives losses, the workers then tell worker 0 whether it went well, and worker 0 answers
all of them. If a worker was lost on the way, the others undo what they did, form a group of their
own and do it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from paceline.errors import PeerLost
from paceline.run.rank import group_apart
from paceline.strategies.base import Context, Traits
from paceline.transport.together import WELL, assemble, assemble_saying, assemble_with
from paceline.types import RecorderLike

T = TypeVar("T")
# A worker that was asked to leave after a step says -(step * REASONS + why).
REASONS = 4


class Gathering:
    """The workers that are alive, and their group."""

    def __init__(self, ctx: Context, traits: Traits, recorder: RecorderLike) -> None:
        self._ctx, self._traits, self._recorder = ctx, traits, recorder
        self.members = tuple(r for r in ctx.transport.present if r < ctx.workers)
        self._formed, self._groups = self.members, 0  # those in `ctx.peers`, and groups made since
        # The kept-together strategies do not need to wait for each other.
        self._needed = traits.survives or not traits.in_step
        self.expected = 0  # why all workers leave after the next gathering (common/asked.py)
        self.leaving = 0  # the same, once that gathering has taken place

    def begin(self) -> None:
        """Wait until all workers have set themselves up; raise `PeerLost` if one has been lost."""
        if not self._traits.survives or len(self.members) == 1:
            self._ctx.peers.barrier()
            return
        here = assemble(self._ctx.transport, self.members, True)
        if here != self.members:
            raise PeerLost(min(set(self.members) - set(here)), "it ended during the set up")

    def do(self, body: Callable[[], T], step: int, undone: Sequence[Tensor] = ()) -> T:
        """Wait for all workers, then do something with them; return its result.

        `undone`: the tensors that `body` changes. They are put back before it is done again.
        """
        if not self._needed or len(self.members) == 1:
            self.leaving = self.expected
            self._form()
            return body()
        if not self._traits.survives:
            self._wait_for_all(step)
            return body()
        kept = [tensor.clone() for tensor in undone]
        self._wait_for_all(step)
        for _ in range(2 * len(self.members)):
            lost: PeerLost | None = None
            try:
                self._form()
                result = body()
            except PeerLost as error:
                if error.rank in self._ctx.servers:
                    raise
                lost = error
                self._ctx.peers.close()  # the others notice, if they wait for this worker
                self._formed = ()
            if self._meet(lost is None, step):
                return result
            self._formed = ()
            for tensor, before in zip(undone, kept, strict=True):
                tensor.copy_(before)
        raise lost or PeerLost(None, "another worker has lost its connections")

    def leave(self, step: int, why: int) -> tuple[int, int] | None:
        """Come together because this worker was asked to leave, and wait for all others.

        Returns why all leave, and after which step. None: others have come to do something else, so
        that all leave after that; this worker has to come there too.
        """
        if len(self.members) == 1:
            return why, step
        words = self._say(step, -(step * REASONS + why))
        asked = [divmod(-word, REASONS) for word in words if word < 0]
        reason = max(why for _, why in asked)
        if len(asked) < len(words):
            self.expected = reason
            return None
        return reason, max(step for step, _ in asked)

    def _wait_for_all(self, step: int) -> None:
        """Wait until all workers have come to the same gathering.

        A worker that was asked to leave comes first, says so, trains on and comes again.
        """
        while asked := [word for word in self._say(step, WELL) if word < 0]:
            self.expected = max(-word % REASONS for word in asked)
        self.leaving = self.expected

    def _say(self, step: int, own: int) -> list[int]:
        """Bring the workers that are alive together. Returns what each of them says."""
        transport, survives = self._ctx.transport, self._traits.survives
        words = assemble_saying(transport, self.members, own, survives)
        self._note(tuple(words), step)
        return list(words.values())

    def part(self, step: int) -> None:
        """Wait for all workers that are alive, for the last time."""
        if self._traits.survives:
            self._meet(True, step)
        else:
            self._ctx.peers.barrier()

    def _meet(self, well: bool, step: int) -> bool:
        """Bring the workers that are alive together. Returns whether all of them are well."""
        here, all_well = assemble_with(self._ctx.transport, self.members, well, True)
        self._note(here, step)
        return all_well

    def _note(self, here: tuple[int, ...], step: int) -> None:
        if here != self.members:
            lost = sorted(set(self.members) - set(here))
            self._recorder.write("lost", ranks=lost, step=step)
            self.members = here

    def _form(self) -> None:
        """Form a group of the workers that are alive, unless there is one."""
        if self._formed != self.members:
            self._groups += 1
            self._formed = self.members
            self._ctx.peers = group_apart(self._ctx.transport, self.members, self._groups)
