"""What can happen to a job: which events are possible now, which comes next, and to whom. Pure.

Knows what is seen of the job (`View`) and a seeded generator; nothing of processes or clocks.

    kind                what happens                                       possible
    join                scale up by one                                    below MAX
    leave               scale down by one: the newest leaves               2 healthy members
    leave_named         scale down by one: any member leaves, also rank 0  2 healthy members
    scale_to_one        scale to 1                                         2 healthy members
    scale_to_max        scale to MAX                                       below MAX
    kill                SIGKILL of any member                              2 healthy members
    kill_rank0          SIGKILL of rank 0                                  2 healthy members
    kill_two            SIGKILL of any two members at once                 3 healthy members
    kill_half           SIGKILL of half of the members, rank 0 among them  4 healthy members
    kill_in_checkpoint  SIGKILL of rank 0 while a checkpoint is written    2 healthy members
    kill_starting       SIGKILL of a worker that is no member yet          there is one
    kill_joiner         SIGKILL of a newcomer just let in, in its transfer there is one to come
    pause               SIGSTOP of any member past the hang limit, SIGCONT 2 healthy members
    freeze              SIGSTOP of any member for good                     2 healthy members
    kill_launcher       SIGKILL of the launcher, which then comes back     always

A healthy member is one that has made a step in the newest generation. The last one is never hurt:
what follows when everybody dies is another benchmark's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from benchmarks.chaos.watch import View

__all__ = ["KINDS", "Deck", "Event", "is_possible"]

_HEALTHY_NEEDED = {
    "leave": 2,
    "leave_named": 2,
    "scale_to_one": 2,
    "kill": 2,
    "kill_rank0": 2,
    "kill_two": 3,
    "kill_half": 4,
    "kill_in_checkpoint": 2,
    "pause": 2,
    "freeze": 2,
}
_GROWTH = ("join", "scale_to_max")
_NEWCOMERS = ("kill_starting", "kill_joiner")
KINDS = (*_HEALTHY_NEEDED, *_GROWTH, *_NEWCOMERS, "kill_launcher")
_TWICE = ("join", "kill")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that is done to the job.

    Attributes:
        kind: what.
        workers: to whom, or who leaves.
        target: how many workers are asked for, or 0.
    """

    kind: str
    workers: tuple[int, ...] = ()
    target: int = 0


def is_possible(kind: str, view: View) -> bool:
    """Return whether an event can happen now without hurting the last healthy member."""
    if kind == "kill_launcher":
        return True
    if kind in _GROWTH:
        return view.target < view.max_workers
    if kind in _NEWCOMERS:
        return bool(view.starting) and bool(view.healthy)
    if kind in ("kill_rank0", "kill_in_checkpoint") and view.members[:1] != view.healthy[:1]:
        return False
    if kind == "kill_in_checkpoint" and not view.checkpoints:
        return False
    return len(view.healthy) >= _HEALTHY_NEEDED[kind]


@dataclass(slots=True, kw_only=True)
class Deck:
    """Gives every kind of event its turn, in random order: like cards that are dealt and shuffled.

    Attributes:
        draw: the seeded generator of the whole run.
    """

    draw: random.Random
    _cards: list[str] = field(default_factory=list)

    def next_event(self, view: View) -> Event | None:
        """Return the first event of the deck that is possible now, or `None`."""
        if not self._cards:
            self.shuffle_in()
        kind = next((one for one in self._cards if is_possible(one, view)), None)
        if kind is None:
            return None
        self._cards.remove(kind)
        return self._aimed(kind, view)

    def shuffle_in(self) -> None:
        """Put another set of cards below the rest."""
        cards = [*KINDS, *_TWICE]
        self.draw.shuffle(cards)
        self._cards += cards

    def _aimed(self, kind: str, view: View) -> Event:
        """Choose to whom it happens."""
        healthy = view.healthy
        if kind in ("join", "leave", "leave_named"):
            named = (self.draw.choice(healthy),) if kind == "leave_named" else ()
            step = 1 if kind == "join" else -1
            base = view.target if kind == "join" else len(view.members)
            return Event(kind=kind, workers=named, target=base + step)
        if kind in ("scale_to_one", "scale_to_max"):
            return Event(kind=kind, target=1 if kind == "scale_to_one" else view.max_workers)
        if kind in ("kill_rank0", "kill_in_checkpoint"):
            return Event(kind=kind, workers=healthy[:1])
        if kind == "kill_half":
            others = self.draw.sample(healthy[1:], len(healthy) // 2 - 1)
            return Event(kind=kind, workers=(healthy[0], *others))
        if kind == "kill_starting":
            return Event(kind=kind, workers=(self.draw.choice(view.starting),))
        if kind in ("kill_launcher", "kill_joiner"):
            return Event(kind=kind)
        number = 2 if kind == "kill_two" else 1
        return Event(kind=kind, workers=tuple(self.draw.sample(healthy, number)))
