"""The baseline: how long torchrun takes to go on after a join and after a killed worker.

Knows torchrun's command line and the records of its workers; nothing of elastane's launcher.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.processes import free_port
from benchmarks.resize.job import ROOT, Tail, worker_environment
from benchmarks.resize.measure import Line

__all__ = ["measure_torchrun"]

_LIMIT_S = 120.0
_POLL_S = 0.05
_STEPS_BEFORE = 50
_END_LIMIT_S = 10.0


class _Agents:
    """Agents of torchrun on one machine, as if each were a machine of its own.

    Args:
        folder: an empty one.
        digits: file of the digits.
        parameters: of the model.
    """

    def __init__(self, folder: Path, *, digits: Path, parameters: int) -> None:
        self._folder = folder
        self._agents: list[subprocess.Popen[bytes]] = []
        self._tails: dict[Path, Tail] = {}
        self.lines: list[Line] = []
        # Only the time before the first step hangs on `last_call_timeout`: it is how long one
        # agent waits for others. What is measured has as many agents as there may be.
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"),
            *("--rdzv-id=resize", "--rdzv-conf=last_call_timeout=3", "--max-restarts=3"),
            *("-m", "benchmarks.resize.torchrun_worker", "--digits", str(digits)),
            *("--records", str(folder / "records"), "--parameters", str(parameters)),
            *("--checkpoint", str(folder / "checkpoint.pt")),
        ]

    def start(self) -> None:
        """Start one more agent."""
        # With its default, an agent that joins later never gets in on torch 2.13.
        environment = {**worker_environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self._folder / f"agent-{len(self._agents)}.log").open("wb") as log:
            agent = subprocess.Popen(
                self._command, cwd=ROOT, env=environment, stdout=log, stderr=log
            )
        self._agents.append(agent)

    def wait_for(self, found: Callable[[], Line | None]) -> Line | None:
        """Return what is found in the lines, or `None` after the time limit."""
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            for path in (self._folder / "records").glob("*.jsonl"):
                self.lines += [
                    Line(**one) for one in self._tails.setdefault(path, Tail(path)).new()
                ]
            line = found()
            if line is not None:
                return line
            time.sleep(_POLL_S)
        return None

    def steps(self, *, after: float, world_size: int | None = None) -> list[Line]:
        """Return the steps that were finished after a moment, oldest first."""
        wanted = [
            line
            for line in self.lines
            if line.time > after and line.world_size == (world_size or line.world_size)
        ]
        return sorted(wanted, key=lambda line: line.time)

    def end(self) -> None:
        """End all agents and workers."""
        workers = [pid for agent in self._agents for pid in _children(agent.pid)]
        for agent in self._agents:
            agent.send_signal(signal.SIGTERM)
        for agent in self._agents:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(_END_LIMIT_S)
            agent.kill()
            agent.wait()
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def measure_torchrun(folder: Path, *, digits: Path, parameters: int) -> dict[str, float | None]:
    """Return what a join and a killed worker cost under torchrun, each once.

    Returns:
        `join_s` from the start of the second agent to the first finished step with both;
        `kill_s` from SIGKILL of a worker to the next finished step; `join_gap_s` and `kill_gap_s`
        how long no step was finished. `None` where it took longer than two minutes.
    """
    (folder / "records").mkdir(parents=True)
    with _agents(folder, digits=digits, parameters=parameters) as agents:
        agents.start()
        agents.wait_for(lambda: _nth(agents.steps(after=0.0), _STEPS_BEFORE))
        join = _measure(agents, action=agents.start, world_size=2)
        agents.wait_for(lambda: _nth(agents.steps(after=0.0, world_size=2), _STEPS_BEFORE))
        kill = _measure(agents, action=lambda: _kill_one(agents.lines), world_size=None)
    names = ("join_s", "join_gap_s", "kill_s", "kill_gap_s")
    return dict(zip(names, (*join, *kill), strict=True))


def _measure(
    agents: _Agents, *, action: Callable[[], None], world_size: int | None
) -> tuple[float | None, float | None]:
    """Return the time from an action to the next step of another process, and the gap before it."""
    before = {line.pid for line in agents.lines}
    begin = time.monotonic()
    action()
    first = agents.wait_for(
        lambda: next(
            (
                line
                for line in agents.steps(after=begin, world_size=world_size)
                if line.pid not in before
            ),
            None,
        )
    )
    if first is None:
        return None, None
    last = max(line.time for line in agents.lines if line.pid in before)
    return round(first.time - begin, 2), round(first.time - last, 2)


def _kill_one(lines: list[Line]) -> None:
    newest = max(lines, key=lambda line: line.time)
    os.kill(newest.pid, signal.SIGKILL)


def _nth(lines: list[Line], count: int) -> Line | None:
    return lines[count] if len(lines) > count else None


@contextmanager
def _agents(folder: Path, *, digits: Path, parameters: int) -> Iterator[_Agents]:
    agents = _Agents(folder, digits=digits, parameters=parameters)
    try:
        yield agents
    finally:
        agents.end()


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return [int(one) for one in path.read_text().split()]
    except OSError:
        return []
