"""A job without processes: the launcher's own decision code over a store in memory.

Plays agents and workers; knows nothing of groups, networks or what a change is called.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, cast

from benchmarks.scale.memory_store import MemoryStore
from elastane._env import ElasticLaunch
from elastane.launch.clock import AwakeClock
from elastane.launch.decider import LOOK_S, Decider
from elastane.launch.desk import Desk
from elastane.launch.folder import LauncherRecord
from elastane.launch.link import Store
from elastane.protocol import (
    INBOX,
    AgentHere,
    Beat,
    EndWorker,
    Entered,
    Exited,
    Hello,
    Message,
    Ready,
    StartWorker,
    beat_key,
    heartbeat_key,
    orders_key,
    parse_order,
)
from elastane.roster import Rules

__all__ = ["BEAT_S", "INSTANT_S", "SLOTS", "SimulatedJob"]

SLOTS = 8
BEAT_S = ElasticLaunch(store="", job="", worker=1, agent="", slot=0, run_dir="").beat_interval_s
INSTANT_S, _LIMIT_TURNS = 0.01, 200
_STATUS = {"progress": 0.5, "num_steps": 1000, "lr": 0.1, "gain": 1.5, "batch": 64}


class SimulatedJob(AbstractContextManager["SimulatedJob"]):
    """Machines of 8 slots whose workers do as they are told, and the launcher that decides.

    A turn is what the coordinator does at once: take what came in, look, act. Its processor time
    is the launcher's alone: what agents and workers would do is not in it.

    Args:
        workers: how many are wanted at first.
        folder: for the launcher's records.

    Attributes:
        store: counts what goes through it.
        decider: the launcher's state.
        cpu_s: processor seconds of the turns so far.
    """

    def __init__(self, workers: int, *, folder: Path) -> None:
        self.store = MemoryStore()
        self.cpu_s = 0.0
        self._time, self._beaten, self._count, self._step = 0.0, 0.0, 0, 0
        self._order = random.Random(0)
        self._places: dict[int, tuple[str, int]] = {}
        self._silent: set[int] = set()
        self._agents = [f"node-{index}" for index in range(-(-workers // SLOTS) + 1)]
        self._desk = Desk("here:1", say=_say_nothing, connect=lambda _: cast("Store", self.store))
        self.decider = Decider(
            self._desk,
            run_dir=folder,
            record=LauncherRecord(job="scale", pid=os.getpid(), store="", target=workers),
            rules=Rules(min_workers=1, max_workers=workers + SLOTS),
            say=_say_nothing,
            clock=AwakeClock(gap_s=float("inf"), source=lambda: self._time),
        )

    def __enter__(self) -> Self:
        self._desk.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._desk.__exit__()

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of the newest generation's workers."""
        return self.decider.now.members

    def register(self) -> None:
        """Have all machines say that they are there, and the first workers be started."""
        self.turn(AgentHere(agent=one, host=one, slots=SLOTS, pid=1) for one in self._agents)

    def turn(self, facts: Iterable[Message] = (), *, seconds: float = LOOK_S) -> None:
        """Let time pass, all live workers and machines beat, and the launcher act once."""
        self._time += seconds
        if self._time - self._beaten > BEAT_S - INSTANT_S:
            self._beat()
        texts = [fact.to_json().encode() for fact in facts]
        began = time.process_time()
        for text in texts:
            self.store.queues[INBOX].put(text)
        for _ in texts:
            item = self._desk.next_item(_LIMIT_TURNS)
            assert isinstance(item, Message)
            self.decider.note(item)
        self.decider.look()
        self.decider.act()
        self.cpu_s += time.process_time() - began

    def obey(self) -> list[Message]:
        """Start and end workers as was ordered; return what they and their agents say."""
        facts: list[Message] = []
        for agent in self._agents:
            queue = self.store.queues[orders_key(agent)]
            while not queue.empty():
                facts += self._carry_out(agent, parse_order(queue.get()))
        return facts

    def settle(self) -> None:
        """Go on until all members have entered and no order is open."""
        for _ in range(_LIMIT_TURNS):
            facts = [*self.obey(), *self._entering()]
            if not facts and self.decider.roster.settled is not None:
                return
            self.turn(facts)
        raise RuntimeError(f"the simulated job did not settle: {self.decider.now.reason}")

    def die(self, workers: Sequence[int], *, code: int = -9) -> list[Exited]:
        """Have workers end; return what their agents say."""
        places = {one: self._places.pop(one) for one in workers}
        return [Exited(agent=agent, worker=one, code=code) for one, (agent, _) in places.items()]

    def hang(self, worker: int) -> None:
        """Have a worker stand still."""
        self._silent.add(worker)

    def lose_machine(self) -> None:
        """Have the machine of rank 0 vanish."""
        lost = self._places[self.members[0]][0]
        self._agents.remove(lost)
        self._places = {one: place for one, place in self._places.items() if place[0] != lost}

    def _carry_out(self, agent: str, order: Message) -> list[Message]:
        match order:
            case StartWorker():
                self._places[order.worker] = agent, order.slot
                known: dict[str, Any] = {"agent": agent, "slot": order.slot, "host": agent}
                hello = Hello(worker=order.worker, pid=order.worker, **known)
                return [hello, Ready(worker=order.worker)]
            case EndWorker() if order.worker in self._places:
                return list(self.die([order.worker], code=0))
        return []

    def _entering(self) -> list[Message]:
        """Return what the members say that have yet to enter, in any order, and those that go."""
        now, roster = self.decider.now, self.decider.roster
        entering = [w for w in now.members if roster.workers[w].entered < now.number]
        self._order.shuffle(entering)
        self._step += bool(entering)
        known = {"generation": now.number, "step": self._step, "source": 1}
        gone = [w for w in now.dismissed if w in self._places and w not in now.members]
        return [*(Entered(worker=w, **known) for w in entering), *self.die(gone, code=0)]

    def _beat(self) -> None:
        self._beaten = self._time
        self._count += 1
        for agent in self._agents:
            self.store.values[heartbeat_key(agent)] = str(self._count).encode()
        first = self.members[0] if self.members else 0
        for worker in self._places.keys() - self._silent:
            status = _STATUS if worker == first else {}
            beat = Beat(
                count=self._count,
                generation=self.decider.now.number,
                step=self._step,
                arrived=self._step + 1,
                status=status,
            )
            self.store.values[beat_key(worker)] = beat.to_json().encode()


def _say_nothing(_: str) -> None:
    """Keep a message of the launcher to oneself."""
