"""The agent of one machine: torch's elastic agent, which here never ends a healthy worker.

Knows orders, slots and the line to the coordinator; decides nothing.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from elastane import _env
from elastane.launch.addresses import interface_to
from elastane.launch.console import Console
from elastane.launch.folder import log_paths, read_agent, tail_of, write_agent
from elastane.launch.link import LOST, Store, master_key, parse_address, serve
from elastane.launch.rendezvous import AgentLine, Event, Orphaned, Reconnected, StoreRendezvous
from elastane.launch.slots import Slots
from elastane.protocol import Draining, EndAgent, EndWorker, Exited, StartWorker

__all__ = ["AgentJob", "SlotAgent"]

_WAIT_S = 0.1
_PAUSE_S = 0.0001  # torch's loop sleeps between two looks; ours waits inside the look
_ORPHAN_GRACE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJob:
    """What an agent has to know of its job.

    Attributes:
        job: its name.
        run_dir: the run's folder.
        max_workers: how many workers there may be.
        heartbeat_limit_s: silence after which an agent counts as lost.
        orphan_limit_s: seconds without a launcher after which workers and agents end.
        group_size: processes of a worker.
    """

    job: str
    run_dir: str
    max_workers: int
    heartbeat_limit_s: float = 3.0
    orphan_limit_s: float = 300.0
    group_size: int = 1


class SlotAgent(LocalElasticAgent):
    """Runs workers in slots as the coordinator orders, and says at once when one ended.

    Args:
        line: to the coordinator.
        slots: places for workers.
        num_slots: how many.
        job: what it has to know of the job.
        console: shows the workers' logs.

    Attributes:
        code: exit code that the coordinator asked for.
    """

    def __init__(
        self, *, line: AgentLine, slots: Slots, num_slots: int, job: AgentJob, console: Console
    ) -> None:
        self._line = line
        self._slots = slots
        self._num_slots = num_slots
        self._job = job
        self._console = console
        self._ending = False
        self._draining = False
        self._meeting_places: dict[int, Store] = {}
        self.code = 1
        handler = StoreRendezvous(line, job=job.job, register=self._register)
        spec = WorkerSpec(
            role="worker",
            local_world_size=max(num_slots, 1),  # torch knows no agent without workers
            rdzv_handler=handler,
            entrypoint="elastane",
            max_restarts=0,
            monitor_interval=_PAUSE_S,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))

    @property
    def agent(self) -> str:
        """The agent's id."""
        return self._line.agent

    def drain(self) -> None:
        """Have the workers leave as agreed, and then end. A signal handler may call this."""
        self._draining = True
        self._slots.wake()

    # torch's loop, `run`, calls these; it declares them as wrapped, which pyright can't match.

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:  # pyright: ignore
        self._adopt()
        info = worker_group.spec.rdzv_handler.next_rendezvous()
        worker_group.store = info.store  # pyright: ignore[reportAttributeAccessIssue]
        worker_group.workers = []
        worker_group.state = WorkerState.HEALTHY

    def _monitor_workers(self, _worker_group: WorkerGroup) -> RunResult:  # pyright: ignore
        self._report_ends()
        if self._draining:
            self._draining = not self._line.push(Draining(agent=self._line.agent))
        for event in _taken(self._line.events):
            self._carry_out(event)
        if self._ending and not self._slots.workers:
            self._line.push(Draining(agent=self._line.agent))  # the store may go now
            return RunResult(state=WorkerState.SUCCEEDED)
        return RunResult(state=WorkerState.HEALTHY)

    def _restart_workers(self, _worker_group: WorkerGroup) -> None:  # pyright: ignore
        raise AssertionError("healthy workers are never restarted")

    def _stop_workers(self, _worker_group: WorkerGroup) -> None:  # pyright: ignore
        self._shutdown()

    def _shutdown(self, death_sig: object = None, timeout: int = 0) -> None:  # noqa: ARG002
        self._slots.kill_all()

    def _exit_barrier(self) -> None:
        """Wait for nobody: the coordinator knows when the job is over."""

    def _register(self) -> None:
        workers = {slot: process.worker for slot, process in self._slots.workers.items()}
        self._line.register(slots=self._num_slots, workers=workers)

    def _adopt(self) -> None:
        """Take over the workers that outlived an earlier launcher."""
        for slot, one in read_agent(Path(self._job.run_dir), self._line.agent).items():
            worker, team = int(one["worker"]), [one, *one.get("followers", ())]
            pids, born = [each["pid"] for each in team], [each["born"] for each in team]
            if self._slots.adopt(int(slot), worker=worker, pids=pids, born=born):
                self._console.follow(worker, from_end=True, group_size=len(team))

    def _report_ends(self) -> None:
        ended = self._slots.wait(_WAIT_S)
        for one in ended:  # all are told of before anything else is done
            message = self._last_words(one.worker, index=one.index) if one.code else ""
            known = one.code is not None
            self._line.push(
                Exited(
                    agent=self._line.agent,
                    worker=one.worker,
                    code=one.code or 0,
                    message=message,
                    known=known,
                )
            )
        for one in ended:
            self._slots.bury(one.slot)
            self._console.leave(one.worker)
        if ended:
            self._record()

    def _carry_out(self, event: Event) -> None:
        match event:
            case StartWorker():
                self._start(event)
            case EndWorker():
                self._slots.end(event.worker, grace_s=event.grace_s)
            case EndAgent():
                self._end(code=event.code, grace_s=event.grace_s)
            case Reconnected():
                self._register()
            case Orphaned():
                self._end(code=1, grace_s=_ORPHAN_GRACE_S)

    def _start(self, order: StartWorker) -> None:
        try:
            if order.slot in self._slots.workers:
                raise OSError(f"slot {order.slot} is taken")
            environments = self._environments(order)
            self._slots.start(order.slot, worker=order.worker, environments=environments)
        except LOST as error:
            message = f"could not be started: {error}"
            agent, worker = self._line.agent, order.worker
            self._line.push(Exited(agent=agent, worker=worker, code=127, message=message))
        else:
            self._console.follow(order.worker, group_size=self._job.group_size)
            self._record()

    def _end(self, *, code: int, grace_s: float) -> None:
        self.code = code
        self._ending = True
        for process in self._slots.workers.values():
            self._slots.end(process.worker, grace_s=grace_s)

    def _record(self) -> None:
        live = {
            str(slot): {"worker": one.worker, "pid": one.pid, "born": one.born}
            | {"followers": [{"pid": each.pid, "born": each.born} for each in one.followers]}
            for slot, one in self._slots.workers.items()
        }
        write_agent(Path(self._job.run_dir), self._line.agent, live)

    def _last_words(self, worker: int, *, index: int) -> str:
        path = log_paths(Path(self._job.run_dir), worker, index=index)[1]
        words = tail_of(path)
        return f"{path}:\n{words}" if words else f"{path} is empty"

    def _environments(self, order: StartWorker) -> list[Mapping[str, str]]:
        """Return what each process of a worker finds in its environment.

        The processes of a team are a torch job of their own, which meets at a store of its own.
        """
        one, size = self._environment(order), self._job.group_size
        if size == 1:
            return [one]
        self._meeting_places[order.slot] = place = serve(0)
        port, num_local = str(place.port), size * int(one["LOCAL_WORLD_SIZE"])
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
        common |= {"ELASTANE_GROUP_SIZE": str(size), "LOCAL_WORLD_SIZE": str(num_local)}
        own = (
            {"ELASTANE_GROUP_INDEX": index, "RANK": index, "LOCAL_RANK": size * order.slot + index}
            for index in range(size)
        )
        return [one | common | {name: str(v) for name, v in each.items()} for each in own]

    def _environment(self, order: StartWorker) -> dict[str, str]:
        """Return what a worker finds in its environment: ours, and torchrun's variables."""
        host, _ = parse_address(self._line.address)
        port = self._line.store.get(master_key(order.attempt)).decode()
        own = _env.ElasticLaunch(
            store=self._line.address,
            job=self._job.job,
            worker=order.worker,
            agent=self._line.agent,
            slot=order.slot,
            run_dir=self._job.run_dir,
            expected_workers=order.expected_workers,
            max_workers=self._job.max_workers,
            orphan_limit_s=self._job.orphan_limit_s,
        )
        torchrun = {
            "RANK": order.rank,
            "WORLD_SIZE": order.expected_workers,
            "LOCAL_RANK": order.slot,
            "LOCAL_WORLD_SIZE": min(self._num_slots, order.expected_workers),
            "GROUP_RANK": 0,
            "ROLE_RANK": order.rank,
            "ROLE_NAME": "worker",
            "ROLE_WORLD_SIZE": order.expected_workers,
            "GROUP_WORLD_SIZE": 1,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": order.attempt,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": self._job.job,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        own_names = own.environment() | _env.worker_defaults() | _interface_to(host)
        return own_names | {name: str(value) for name, value in torchrun.items()}


def _interface_to(host: str) -> dict[str, str]:
    """Return what has process groups listen where the other machines are, unless it is set.

    Gloo would listen on the address of this machine's name, which may be the loopback's.
    """
    interface = None if _env.gloo_interface() else interface_to(host)
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}


def _taken(events: queue.SimpleQueue[Event]) -> list[Event]:
    """Return all events that are there."""
    return [events.get_nowait() for _ in range(events.qsize())]
