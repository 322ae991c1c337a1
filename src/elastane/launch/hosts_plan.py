"""What to do next about one machine of a file of hosts, and why. Pure.

Knows the machine's line, its heartbeat and how its process ended; no file, process or store.
Heartbeats are the only proof that an agent is there: the end of ssh proves nothing.

    waiting --> preparing --> starting --heard--> there --line gone, or other slots--> leaving
       ^  |         |             |                 |                                     |
       |  +--------heard---------------------------^|                                     |
       +--------- failed, tried again later --------+          ended, or silent: gone <---+
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from elastane.launch.facts import restart_delay_s
from elastane.launch.hosts_file import Host
from elastane.launch.hosts_log import Change

__all__ = ["Place", "PlanRules", "Sight", "Step", "next_step"]

Stage = Literal["waiting", "preparing", "starting", "there", "leaving", "gone"]
Action = Literal["", "prepare", "start", "drain", "kill", "release"]

_MARGIN_S = 0.5  # a heartbeat that is read later than this was not sent before
_DRAIN_AGAIN_S = 2.0  # an agent that comes late has to be told as well
_STEADY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """What holds for all machines.

    Attributes:
        silence_limit_s: how long an agent may be silent before it counts as lost.
        start_patience_s: how long one may take from its start to its first heartbeat.
        prepares: whether something is to be done on a machine before an agent starts there.
    """

    silence_limit_s: float = 3.0
    start_patience_s: float = 120.0
    prepares: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one machine stands.

    Attributes:
        name: of the machine.
        slots: that its agent was started with; 0 before that.
        stage: see above.
        since: when the stage began.
        due: when a waiting machine is tried, or a leaving one is told again.
        failures: in a row.
        joined: whether its agent was heard since its start.
        ended: how the process ended that the agent was started through, or "".
        told: the newest change in the log, and its cause.
    """

    name: str
    slots: int = 0
    stage: Stage = "waiting"
    since: float = 0.0
    due: float = 0.0
    failures: int = 0
    joined: bool = False
    ended: str = ""
    told: tuple[Change | None, str] = (None, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What is seen of a machine.

    Attributes:
        heard: when its agent's heartbeat last changed.
        runs: whether the process that was started for it runs.
        code: exit code of that process, once it has ended.
        words: the last that it printed.
    """

    heard: float = -math.inf
    runs: bool = False
    code: int | None = None
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What follows.

    Attributes:
        place: where the machine stands now.
        action: to be done for it.
        change: for the log, if there is one.
        note: for the console: the change's cause, or something that is no change.
    """

    place: Place
    action: Action = ""
    change: Change | None = None
    note: str = ""


def next_step(
    place: Place, host: Host | None, sight: Sight, *, rules: PlanRules, time: float
) -> Step | None:
    """Return what follows for a machine, or `None` if everything stays as it is.

    Args:
        place: where it stands.
        host: its line, `None` if it has none any more.
        sight: what is seen of it.
        rules: what holds for all.
        time: seconds.

    Example:
        >>> begun = next_step(
        ...     Place(name="node-1"), Host(name="node-1"), Sight(), rules=PlanRules(), time=0.0
        ... )
        >>> begun.action, begun.place.stage
        ('start', 'starting')
    """
    heard = sight.heard > place.since + _MARGIN_S
    match place.stage:
        case "waiting" | "starting" if heard:
            return _arrive(place, time=time)
        case "waiting":
            return _wait(place, host, rules=rules, time=time)
        case "preparing":
            return _prepare(place, host, sight, time=time)
        case "starting":
            return _start(place, host, sight, rules=rules, time=time)
        case "there":
            return _stay(place, host, sight, rules=rules, time=time)
        case "leaving":
            return _leave(place, host, sight, rules=rules, time=time)
    return None


def _wait(place: Place, host: Host | None, *, rules: PlanRules, time: float) -> Step | None:
    if host is None:
        return _go(place, None, why="its line was removed", time=time)
    if time < place.due:
        return None
    if place.told[0] == "ADDED":
        return _fail(place, "it was not there when the launcher came back", time=time)
    if rules.prepares:
        return Step(place=replace(place, stage="preparing", since=time), action="prepare")
    return _begin(place, host, time=time)


def _prepare(place: Place, host: Host | None, sight: Sight, *, time: float) -> Step | None:
    if host is None:
        return _go(place, None, why="its line was removed", time=time)
    if sight.code is None:
        return None
    if sight.code == 0:
        return _begin(place, host, time=time)
    return _fail(place, f"--prepare {_ending(sight)}", time=time)


def _begin(place: Place, host: Host, *, time: float) -> Step:
    begun = replace(place, stage="starting", slots=host.slots, since=time, joined=False, ended="")
    return Step(place=begun, action="start")


def _start(
    place: Place, host: Host | None, sight: Sight, *, rules: PlanRules, time: float
) -> Step | None:
    if host is None:
        return _drain(place, why="its line was removed", time=time)
    if sight.code is not None:
        return _fail(place, f"the agent {_ending(sight)}", time=time)
    if time - place.since > rules.start_patience_s:
        return _fail(place, f"no heartbeat within {rules.start_patience_s:g} s", time=time)
    return None


def _arrive(place: Place, *, time: float) -> Step:
    there = replace(place, stage="there", since=time, joined=True)
    if place.told[0] == "ADDED":
        return Step(place=there)
    cause = "it is heard again" if place.stage == "waiting" else f"joined, slots={place.slots}"
    return _tell(there, "ADDED", cause)


def _stay(
    place: Place, host: Host | None, sight: Sight, *, rules: PlanRules, time: float
) -> Step | None:
    if host is None:
        return _drain(place, why="its line was removed", time=time)
    if place.slots and host.slots != place.slots:
        why = f"its line says slots={host.slots}, was {place.slots}: it leaves and comes back"
        return _drain(place, why=why, time=time)
    if time - sight.heard > rules.silence_limit_s:
        ended = f"; {place.ended}" if place.ended else ""
        return _fail(place, f"no heartbeat for {rules.silence_limit_s:g} s{ended}", time=time)
    if sight.code is not None:
        ended = f"what its agent was started through ended with code {sight.code}"
        note = f"{ended}; the agent goes on as long as it is heard"
        return Step(place=replace(place, ended=ended), action="kill", note=note)
    return None


def _leave(
    place: Place, host: Host | None, sight: Sight, *, rules: PlanRules, time: float
) -> Step | None:
    # One that was not heard yet may only be slow to start.
    is_new = sight.runs and not place.joined and sight.heard <= place.since
    limit_s = rules.start_patience_s if is_new else rules.silence_limit_s
    silent = time - max(sight.heard, place.since) > limit_s
    if sight.code == 0 or silent:
        return _go(place, host, why=place.told[1], time=time)
    if time >= place.due:
        return Step(place=replace(place, due=time + _DRAIN_AGAIN_S), action="drain")
    return None


def _drain(place: Place, *, why: str, time: float) -> Step:
    leaving = replace(
        place,
        stage="leaving",
        since=time,
        due=time + _DRAIN_AGAIN_S,
        told=(place.told[0], why),
    )
    return Step(place=leaving, action="drain", note=f"{why}; its workers leave")


def _go(place: Place, host: Host | None, *, why: str, time: float) -> Step:
    """Have done with a machine, or begin anew if it is wanted again."""
    after = replace(place, stage="gone" if host is None else "waiting", since=time, due=time)
    after = replace(after, slots=0, failures=0, ended="")
    return replace(_tell(after, "REMOVED", why), action="release")


def _fail(place: Place, cause: str, *, time: float) -> Step:
    steady = place.stage == "there" and time - place.since > _STEADY_S
    failures = 1 if steady else place.failures + 1
    due = time + restart_delay_s(failures)
    failed = replace(place, stage="waiting", since=time, due=due, failures=failures, ended="")
    if place.told == ("FAILED", cause):
        return Step(place=failed, action="kill")
    return replace(_tell(failed, "FAILED", cause), action="kill")


def _tell(place: Place, change: Change, cause: str) -> Step:
    return Step(place=replace(place, told=(change, cause)), change=change, note=cause)


def _ending(sight: Sight) -> str:
    return f"ended with code {sight.code}" + (f": {sight.words}" if sight.words else "")
