"""What supervisor and workers say to each other through the job's store, and under which keys.

Plain values and their JSON. Knows nothing of torch, processes or decisions.

    key                  holds                                             written by
    now                  the newest generation                             coordinator
    generation/<n>       generation n; never changes once set              coordinator
    inbox                queue of facts                                    workers, agents
    orders/<agent>       queue of orders                                   coordinator
    heartbeat/<agent>    a counter                                         agent
    released/<agent>     there once the agent has no more to do            launcher
    beat/<worker>        a worker's beat: where it stands                  its watcher thread
    meeting/<n>          how many members of generation n have arrived     members
    group/<n>/...        addresses of generation n's process group         members
    streams              queue of newcomers that want to follow a    newcomers
                         member; streams/...: addresses of the two
    worker ids           number of the last worker id that was given       coordinator
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Self

__all__ = [
    "INBOX",
    "NOW",
    "STREAMS",
    "WORKER_IDS",
    "AgentHere",
    "Beat",
    "Broken",
    "Done",
    "Draining",
    "EndAgent",
    "EndWorker",
    "Entered",
    "Exited",
    "Generation",
    "Hello",
    "Leaving",
    "Message",
    "Ready",
    "StartWorker",
    "beat_key",
    "generation_key",
    "group_prefix",
    "heartbeat_key",
    "meeting_key",
    "orders_key",
    "parse_fact",
    "parse_order",
    "released_key",
]

NOW = "now"
INBOX = "inbox"
WORKER_IDS = "worker ids"
STREAMS = "streams"


def generation_key(number: int) -> str:
    """Return the key of a generation's record."""
    return f"generation/{number}"


def orders_key(agent: str) -> str:
    """Return the key of an agent's queue of orders."""
    return f"orders/{agent}"


def heartbeat_key(agent: str) -> str:
    """Return the key of an agent's heartbeat."""
    return f"heartbeat/{agent}"


def released_key(agent: str) -> str:
    """Return the key that says that an agent has no more to do."""
    return f"released/{agent}"


def beat_key(worker: int) -> str:
    """Return the key of a worker's beat."""
    return f"beat/{worker}"


def meeting_key(number: int) -> str:
    """Return the key that counts who has arrived in a generation."""
    return f"meeting/{number}"


def group_prefix(number: int) -> str:
    """Return the prefix of the keys of a generation's process group."""
    return f"group/{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A value that travels as one JSON object; unknown fields are refused."""

    kind: ClassVar[str] = ""

    def to_json(self) -> str:
        """Return the message as JSON, with its kind."""
        return json.dumps({"kind": self.kind, **asdict(self)})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Return the message of these values; lists become tuples."""
        own = _field_names(cls)
        given = {name: value for name, value in values.items() if name != "kind"}
        if not own.issuperset(given):
            raise ValueError(f"unknown fields {sorted(set(given) - own)} in a {cls.kind} message")
        return cls(**{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the message that `to_json` wrote."""
        return cls.from_mapping(json.loads(text))


@cache
def _field_names(message: type[Message]) -> frozenset[str]:
    return frozenset(one.name for one in fields(message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation(Message):
    """Who takes part from now on. Published by the coordinator, never changed, never reused.

    Attributes:
        number: grows by one with every change.
        members: worker ids in the order of their ranks. Empty: the job stops; workers write a
            checkpoint and leave.
        cause: one word: start, join, leave, scale, death, hang, lost, broken, hold, stop.
        reason: a sentence for people.
        time: unix seconds.
        go: whether members train; if not, they wait for the next generation.
        lost: workers that are gone without having agreed to it. A group with one of them in it
            is to be broken at once.
        dismissed: workers that leave for good at the step after which all switch.
    """

    kind: ClassVar[str] = "generation"

    number: int = 0
    members: tuple[int, ...] = ()
    cause: str = "start"
    reason: str = ""
    time: float = 0.0
    go: bool = True
    lost: tuple[int, ...] = ()
    dismissed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat(Message):
    """Where a worker stands, told by its watcher thread several times a second.

    Attributes:
        count: grows with every beat; a count that stands still is a stopped process.
        generation: that it is in, or 0.
        met: newest generation in which it has come to the place where its members meet, or 0.
        step: committed steps.
        arrived: number of the newest turn (step, evaluation) whose own part it has finished; a
            member that lags behind the others here keeps them waiting.
        doing: "train" or "evaluate": what its present turn is.
        paused: the reason given to `session.pause`, or "".
        status: numbers for `elastane status`, from rank 0 only.
    """

    kind: ClassVar[str] = "beat"

    count: int
    generation: int = 0
    met: int = 0
    step: int = 0
    arrived: int = 0
    doing: str = "train"
    paused: str = ""
    status: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """A worker opened its session, or found the store again. Its first fact.

    Attributes:
        worker: its id.
        agent: that started it.
        slot: number of its place on that agent.
        pid: process id on its machine.
        host: its machine's name.
        generation: record of the generation that it is in, as `Generation` fields, or empty.
    """

    kind: ClassVar[str] = "hello"

    worker: int
    agent: str
    slot: int
    pid: int
    host: str
    generation: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """A worker has made its discarded step and can enter a generation at once."""

    kind: ClassVar[str] = "ready"

    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered(Message):
    """A member trains in a generation.

    Attributes:
        worker: its id.
        generation: that it entered.
        step: committed steps at which the generation starts.
        source: worker whose state was the most advanced.
    """

    kind: ClassVar[str] = "entered"

    worker: int
    generation: int
    step: int
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken(Message):
    """A member's group broke, or could not be built, and it knows of no newer generation."""

    kind: ClassVar[str] = "broken"

    worker: int
    generation: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving(Message):
    """A worker asks to leave: its machine is going away."""

    kind: ClassVar[str] = "leaving"

    worker: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Message):
    """The run is over for a member: all members have agreed on its last step."""

    kind: ClassVar[str] = "done"

    worker: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHere(Message):
    """An agent is there, or found the store again.

    Attributes:
        agent: its id.
        host: its machine's name.
        slots: how many workers it can hold.
        pid: its process id.
        workers: worker ids of its live workers by slot, as strings (empty at first).
    """

    kind: ClassVar[str] = "agent"

    agent: str
    host: str
    slots: int
    pid: int
    workers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(Message):
    """A worker's process ended.

    Attributes:
        agent: that ran it.
        worker: its id.
        code: exit code; negative: killed by that signal.
        message: last lines of its error log, if it failed.
        known: whether the code is known; that of a worker which outlived its launcher is not.
    """

    kind: ClassVar[str] = "exited"

    agent: str
    worker: int
    code: int
    message: str = ""
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining(Message):
    """An agent was asked to end: its workers are to leave. Also its last word when it ends."""

    kind: ClassVar[str] = "draining"

    agent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker(Message):
    """Order: start a worker in a slot.

    Attributes:
        worker: its id.
        slot: where.
        expected_workers: how large the world will be, for its discarded step.
        attempt: how often the job was started anew, for scripts without a session.
        rank: rank for scripts without a session.
    """

    kind: ClassVar[str] = "start"

    worker: int
    slot: int
    expected_workers: int
    attempt: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWorker(Message):
    """Order: end a worker's process group, politely (SIGTERM, then SIGKILL) or at once."""

    kind: ClassVar[str] = "end worker"

    worker: int
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAgent(Message):
    """Order: end all workers and then yourself."""

    kind: ClassVar[str] = "end agent"

    grace_s: float = 0.0
    code: int = 0


_FACTS: dict[str, type[Message]] = {
    one.kind: one
    for one in (Hello, Ready, Entered, Broken, Leaving, Done, AgentHere, Exited, Draining)
}
_ORDERS: dict[str, type[Message]] = {one.kind: one for one in (StartWorker, EndWorker, EndAgent)}


def parse_fact(text: str | bytes) -> Message:
    """Return the fact that was pushed into the inbox."""
    values = json.loads(text)
    return _FACTS[values["kind"]].from_mapping(values)


def parse_order(text: str | bytes) -> Message:
    """Return the order that was pushed to an agent."""
    values = json.loads(text)
    return _ORDERS[values["kind"]].from_mapping(values)
