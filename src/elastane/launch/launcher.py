"""Starts a job on this machine, or joins one: puts store, coordinator, agent and console together.

Knows what a command line may ask for; decides nothing, and imports no training code.

    exit code    meaning
    0            training reached its end, or the job stopped as asked
    1            the job failed
    2            the arguments were refused
    130          killed: SIGINT twice, or `elastane stop --now`
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from elastane.errors import ArgumentError, describe
from elastane.launch.agent import AgentJob, SlotAgent
from elastane.launch.console import Console
from elastane.launch.control import ControlServer
from elastane.launch.coordinator import Coordinator
from elastane.launch.folder import (
    LauncherRecord,
    lock_agent,
    lock_run,
    read_agent,
    read_launcher,
    write_launcher,
)
from elastane.launch.lifeline import Lifeline
from elastane.launch.link import JOB_KEY, Store, connect, parse_address, serve
from elastane.launch.machines import advertised, joinable, local, port_of, watcher
from elastane.launch.options import RunOptions
from elastane.launch.rendezvous import AgentLine
from elastane.launch.slots import Slots, born_of
from elastane.protocol import EndAgent

__all__ = ["HEARTBEATS_A_LIMIT", "join_job", "parse_workers", "run_job"]

HEARTBEATS_A_LIMIT = 6
"""Heartbeats of a machine in the time after which its silence counts as its loss."""
_END_GRACE_S = 5.0
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def parse_workers(text: str) -> tuple[int, int]:
    """Return the least and most number of workers of N or MIN:MAX.

    Raises:
        ArgumentError: it is neither.

    Example:
        >>> parse_workers("4"), parse_workers("2:8")
        ((1, 4), (2, 8))
    """
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    least, most = (int(found[1] or 1), int(found[2])) if found else (0, 0)
    if not 1 <= least <= most:
        rule = "must be N, or MIN:MAX with 1 <= MIN <= MAX"
        raise ArgumentError(describe("workers", text, rule=rule, way_out="For example 4 or 2:8."))
    return least, most


def _serve(record: LauncherRecord, options: RunOptions, run_dir: Path) -> Store:
    """Open the store where its workers look for it; elsewhere if that is taken and none lives.

    Raises:
        OSError: the port is taken, and workers may look for the store there.
    """
    port = port_of(record, asked=options.port)
    try:
        return serve(port)
    except OSError as error:
        if options.port or len(record.agents) > 1 or _has_workers(record, run_dir):
            message = f"port {port} is taken, and workers of the job may look for its store there"
            raise OSError(f"{message}: free it ({error})") from error
    return serve(0)


def _has_workers(record: LauncherRecord, run_dir: Path) -> bool:
    """Return whether a worker of an earlier launcher lives on this machine."""
    known = [one for agent in record.agents for one in read_agent(run_dir, agent).values()]
    return any(born_of(one["pid"]) == one["born"] for one in known)


def run_job(options: RunOptions) -> int:
    """Run a job to its end and return the exit code of the launcher.

    In a folder whose launcher was killed, its workers are adopted and go on.

    Raises:
        ArgumentError: the folder, the job's name or the port is in use.
        OSError: the store can't be opened.
    """
    run_dir = (options.run_dir or Path("runs") / _new_name(options)).resolve()
    with lock_run(run_dir), ExitStack() as stack:
        record = _record(options, run_dir)
        server = _serve(record, options, run_dir)
        record = replace(record, store=advertised(options, port=server.port))
        job = _agent_job(options, job=record.job, run_dir=run_dir)
        server.set(JOB_KEY, json.dumps(asdict(job)))
        console = stack.enter_context(Console(run_dir))
        coordinator = Coordinator(
            address=local(server.port),
            run_dir=run_dir,
            record=record,
            rules=options.rules,
            say=console.say,
        )
        stack.enter_context(ControlServer(coordinator, job=job.job, run_dir=run_dir))
        write_launcher(run_dir, replace(record, state="running"))
        address = joinable(record.store)
        console.say(f"job {job.job}, run folder {run_dir}, others join at {address}")
        stack.enter_context(coordinator)
        agent, _ = stack.enter_context(
            _agent(job, address=record.store, options=options, console=console)
        )
        if options.hosts is not None:
            known = {"record": record, "run_dir": run_dir, "console": console}
            stack.enter_context(watcher(options, **known, is_over=coordinator.is_over))
        stack.enter_context(_on_signals(end=coordinator.stop, kill=coordinator.kill))
        agent.run()
        return agent.code


def join_job(address: str, options: RunOptions) -> int:
    """Give a job that runs elsewhere the workers of this machine; return the exit code.

    Raises:
        ArgumentError: the address is none, the agent of this id lives, or the job has workers of
            another size.
        OSError: nobody listens there.
    """
    parse_address(address)
    job = AgentJob(**json.loads(connect(address).get(JOB_KEY)))
    if options.group_size not in (None, job.group_size):
        rule = f"the workers of job {job.job} have {job.group_size} processes on all machines"
        way_out = "Leave it out on a machine that joins."
        raise ArgumentError(describe("group_size", options.group_size, rule=rule, way_out=way_out))
    Path(job.run_dir).mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        console = stack.enter_context(Console(Path(job.run_dir)))
        agent, end = stack.enter_context(
            _agent(job, address=address, options=options, console=console)
        )
        if options.lifeline:
            lifeline = Lifeline(agent=agent.agent, address=address, on_end=lambda: end(0))
            stack.enter_context(lifeline)
        console.say(f"job {job.job}: {agent.agent} joined at {address}")
        stack.enter_context(_on_signals(end=agent.drain, kill=lambda: end(130)))
        agent.run()
        return agent.code


@contextmanager
def _agent(
    job: AgentJob, *, address: str, options: RunOptions, console: Console
) -> Iterator[tuple[SlotAgent, Callable[[int], None]]]:
    """Open an agent on this machine, and what ends it with a code; 130 kills its workers."""
    run_dir, host = Path(job.run_dir), socket.gethostname()
    # The launcher's own agent leaves its machine's name to one that the file of hosts asks for.
    host = host if options.hosts is None else f"launcher@{host}"
    with (
        lock_agent(run_dir, host=host, agent=options.agent) as name,
        Slots(run_dir, command=options.command) as slots,
        AgentLine(
            agent=name,
            address=address,
            heartbeat_s=job.heartbeat_limit_s / HEARTBEATS_A_LIMIT,
            orphan_limit_s=job.orphan_limit_s,
            on_event=slots.wake,
        ) as line,
    ):

        def end(code: int) -> None:
            line.events.put(EndAgent(code=code, grace_s=0.0 if code else _END_GRACE_S))
            slots.wake()

        num_slots = job.max_workers if options.slots is None else options.slots
        if options.hosts is not None:
            num_slots = 0
        yield (
            SlotAgent(line=line, slots=slots, num_slots=num_slots, job=job, console=console),
            end,
        )


@contextmanager
def _on_signals(*, end: Callable[[], object], kill: Callable[[], object]) -> Iterator[None]:
    """End the job on a signal, and kill it on the second SIGINT, for the length of a block."""
    seen: list[int] = []

    def handle(number: int, _frame: object) -> None:
        seen.append(number)
        again = len(seen) > 1 and number == signal.SIGINT
        (kill if again else end)()

    before = {number: signal.signal(number, handle) for number in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _record(options: RunOptions, run_dir: Path) -> LauncherRecord:
    """Return what is known from an earlier launcher of this folder, or a fresh record.

    A number of workers asked for at first counts again where none is left that goes on.
    """
    target = options.initial or options.rules.max_workers
    earlier = read_launcher(run_dir)
    job = options.job or (earlier.job if earlier else run_dir.name)
    fresh = LauncherRecord(job=job, pid=os.getpid(), store="", target=target)
    if earlier is None:
        return fresh
    if earlier.state != "running":
        return replace(fresh, worker_ids=earlier.worker_ids)
    goes_on = len(earlier.agents) > 1 or _has_workers(earlier, run_dir)
    rules = options.rules
    kept = min(max(earlier.target, rules.min_workers), rules.max_workers)
    target = kept if goes_on or options.initial is None else options.initial
    return replace(earlier, job=job, pid=os.getpid(), target=target)


def _agent_job(options: RunOptions, *, job: str, run_dir: Path) -> AgentJob:
    return AgentJob(
        job=job,
        run_dir=str(run_dir),
        max_workers=options.rules.max_workers,
        heartbeat_limit_s=options.rules.heartbeat_limit_s,
        orphan_limit_s=options.orphan_limit_s,
        group_size=options.group_size or 1,
    )


def _new_name(options: RunOptions) -> str:
    """Return a name that no earlier run here has: the script's, and the time."""
    if options.job:
        return options.job
    stem = re.sub(r"[^\w.-]+", "-", options.name).strip(".-") or "job"
    return f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
