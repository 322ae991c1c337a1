"""Follows a file of hosts and keeps an agent on each: a thread of the launcher's.

Knows the file, the agents' heartbeats and processes; what is done is planned in `hosts_plan`, and
who takes part is decided by the coordinator.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from elastane.errors import ArgumentError
from elastane.launch.clock import AwakeClock
from elastane.launch.hosts_file import Host, diff_hosts, parse_hosts, shown
from elastane.launch.hosts_log import Change, add_change, log_of, newest_changes, read_changes
from elastane.launch.hosts_plan import Action, Place, PlanRules, Sight, Step, next_step
from elastane.launch.link import LOST, Store, connect
from elastane.launch.ssh import Process, Reach, agent_command, prepare_command
from elastane.launch.watched_file import WatchedFile
from elastane.protocol import INBOX, Draining, heartbeat_key, released_key

__all__ = ["HostsJob", "HostsWatcher", "read_hosts"]

_TICK_S = 0.2
_FAREWELL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsJob:
    """What the watcher has to know of its job.

    Attributes:
        job: its name.
        run_dir: the run's folder.
        address: HOST:PORT of the store on this machine.
        default_slots: of a line that doesn't say.
        reach: how machines are reached.
        rules: what holds for all machines.
    """

    job: str
    run_dir: Path
    address: str
    default_slots: int
    reach: Reach
    rules: PlanRules


def read_hosts(path: Path, *, default_slots: int) -> tuple[Host, ...]:
    """Return the hosts of a file.

    Raises:
        ArgumentError: it breaks a rule.
        OSError: it can't be read.
    """
    return parse_hosts(path.read_text(errors="replace"), default_slots=default_slots)


class HostsWatcher:
    """Keeps an agent on each host of a file, for the length of a block.

    Agents that an earlier launcher of the job has started are met again. When the block ends,
    all agents are released.

    Args:
        path: the file.
        job: what it has to know of the job.
        hosts: what the file said when the job started.
        is_over: whether agents end because the job does.
        say: shows a message.
        follow: shows a file that grows.
    """

    def __init__(
        self,
        path: Path,
        *,
        job: HostsJob,
        hosts: Sequence[Host],
        is_over: Callable[[], bool],
        say: Callable[[str], None],
        follow: Callable[[Path], None],
    ) -> None:
        self._path = path
        self._file = WatchedFile(path)
        self._log = log_of(path)
        self._job = job
        self._hosts = {host.name: host for host in hosts}
        self._is_over = is_over
        self._say = say
        self._follow = follow
        self._clock = AwakeClock()
        self._processes: dict[str, Process] = {}
        self._refusals: dict[str, str] = {}
        self._heard: dict[str, tuple[int, float]] = {}
        self._followed: set[str] = set()
        self._complaint = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastane hosts", daemon=True)

    def __enter__(self) -> Self:
        self._store: Store = connect(self._job.address)
        self._places = self._known_places()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        for name, place in self._places.items():
            self._store.set(released_key(name), "")
            if place.told[0] is not None:
                with suppress(OSError):
                    self._note(name, "REMOVED", "the job is over")
        for process in self._processes.values():
            process.let_go()
        deadline = time.monotonic() + _FAREWELL_S
        for process in self._processes.values():
            process.wait(max(deadline - time.monotonic(), 0.0))
            process.kill()

    def _run(self) -> None:
        while not (self._closed.wait(_TICK_S) or self._is_over()):
            try:
                self._look()
            except LOST as error:
                self._complain(f"{self._path.name}: {error}")

    def _look(self) -> None:
        self._read_file()
        self._listen()
        for name in {**self._hosts, **self._places}:
            self._see_to(name)

    def _known_places(self) -> dict[str, Place]:
        """Return the machines of an earlier launcher: their agents may be there still."""
        now, rules = self._clock.now(), self._job.rules
        told = newest_changes(read_changes(self._log), job=self._job.job)
        places = {}
        for name, last in told.items():
            place = Place(name=name, since=now, slots=last.slots, told=(last.change, last.cause))
            if name in self._hosts:
                places[name] = replace(place, due=now + rules.silence_limit_s)
            elif last.change != "REMOVED":
                why = "its line was removed while the launcher was away"
                places[name] = replace(place, stage="leaving", told=(last.change, why))
        return {name: one for name, one in places.items() if one.told[0] != "REMOVED"}

    def _read_file(self) -> None:
        if not self._file.has_changed():
            return
        try:
            hosts = read_hosts(self._path, default_slots=self._job.default_slots)
        except (ArgumentError, OSError) as error:
            self._complain(f"{self._path.name} changes nothing: {error}")
            return
        self._complaint = ""
        difference = diff_hosts(list(self._hosts.values()), hosts)
        if words := shown(difference):
            self._say(f"{self._path.name}: {words}")
        self._hosts = {host.name: host for host in hosts}

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._say(text)
        self._complaint = text

    def _listen(self) -> None:
        now = self._clock.now()
        for name in self._places:
            count = self._store.add(heartbeat_key(name), 0)
            if count != self._heard.get(name, (0, 0.0))[0]:
                self._heard[name] = (count, now)

    def _see_to(self, name: str) -> None:
        """Do for a machine whatever is next, until there is nothing."""
        now = self._clock.now()
        place = self._places.get(name, Place(name=name, since=now))
        self._places[name] = place
        step = next_step(
            place, self._hosts.get(name), self._sight(name), rules=self._job.rules, time=now
        )
        if step is not None:
            self._take(name, step)

    def _sight(self, name: str) -> Sight:
        heard = self._heard.get(name, (0, -math.inf))[1]
        process = self._processes.get(name)
        if process is None:
            refusal = self._refusals.get(name)
            return Sight(heard=heard, code=None if refusal is None else 127, words=refusal or "")
        code = process.code
        words = "" if code is None else process.words
        return Sight(heard=heard, runs=code is None, code=code, words=words)

    def _take(self, name: str, step: Step) -> None:
        self._places[name] = step.place
        self._act(name, step.action)
        if step.note:
            self._say(f"{name}: {f'{step.change}: ' if step.change else ''}{step.note}")
        if step.change is not None:
            self._note(name, step.change, step.note)
        if step.place.stage == "gone":
            del self._places[name]

    def _note(self, name: str, change: Change, cause: str) -> None:
        job, slots = self._job.job, self._places[name].slots
        add_change(self._log, change=change, host=name, cause=cause, job=job, slots=slots)

    def _act(self, name: str, action: Action) -> None:
        match action:
            case "prepare":
                self._start(name, prepare_command(self._hosts[name], reach=self._job.reach))
                if name in self._processes:
                    self._processes[name].let_go()  # nothing is to be typed there
            case "start":
                self._store.delete_key(released_key(name))
                self._start(name, agent_command(self._hosts[name], reach=self._job.reach))
            case "drain":
                self._store.queue_push(INBOX, Draining(agent=name).to_json())
            case "kill":
                self._drop(name)
            case "release":
                self._store.set(released_key(name), "")
                self._drop(name)

    def _start(self, name: str, command: list[str]) -> None:
        self._drop(name)
        log = self._job.run_dir / "logs" / f"agent-{name}.log"
        if name not in self._followed:
            self._followed.add(name)
            self._follow(log)
        try:
            self._processes[name] = Process(command, folder=self._job.reach.folder, log=log)
        except OSError as error:
            self._refusals[name] = str(error)

    def _drop(self, name: str) -> None:
        self._refusals.pop(name, None)
        process = self._processes.pop(name, None)
        if process is not None:
            process.kill()
