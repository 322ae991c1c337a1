"""A supervisor whose every decision is the test's: real workers, a real store, scripted members."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Condition, Thread
from typing import Any

from elastane import protocol
from elastane._compat import TCPStore
from elastane._env import ElasticLaunch
from elastane.protocol import Generation, Message, parse_fact

WORKER = Path(__file__).with_name("elastic_worker.py")


class Supervisor:
    """Starts workers and publishes the generations that a test asks for."""

    def __init__(self, folder: Path, *, max_workers: int = 4, expected: int = 2) -> None:
        self.folder = folder
        self.max_workers = max_workers
        self.expected = expected
        self.environment: dict[str, str] = {}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.facts: list[Message] = []
        self.generation = Generation()
        self._changed = Condition()
        self.store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(days=1)
        )
        self._inbox = self.store.clone()
        Thread(target=self._listen, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.store.port}"

    def start(self, *workers: int, options: dict[str, Any] | None = None) -> None:
        for worker in workers:
            launch = ElasticLaunch(
                store=self.address,
                job="test",
                worker=worker,
                agent="test",
                slot=worker,
                run_dir=str(self.folder / "run"),
                expected_workers=self.expected,
                max_workers=self.max_workers,
                beat_interval_s=0.05,
            )
            environment = {
                **os.environ,
                **launch.environment(),
                **self.environment,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(WORKER.parent),
            }
            log = (self.folder / f"worker-{worker}.log").open("wb")
            self.processes[worker] = subprocess.Popen(
                [sys.executable, str(WORKER), str(self.folder), json.dumps(options or {})],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def publish(self, *members: int, cause: str = "join", **fields: Any) -> Generation:
        self.generation = Generation(
            number=self.generation.number + 1,
            members=members,
            cause=cause,
            time=time.time(),
            **fields,
        )
        text = self.generation.to_json()
        self.store.set(protocol.generation_key(self.generation.number), text)
        self.store.set(protocol.NOW, text)
        return self.generation

    def wait_for(
        self, kind: type[Message], *, timeout_s: float = 60, count: int = 1, **wanted: Any
    ) -> Message:
        """Wait for the `count`-th fact of a kind with these values; return it."""

        def found() -> list[Message]:
            return [
                fact
                for fact in self.facts
                if isinstance(fact, kind)
                and all(getattr(fact, name) == value for name, value in wanted.items())
            ]

        with self._changed:
            arrived = self._changed.wait_for(lambda: len(found()) >= count, timeout=timeout_s)
        assert arrived, f"no {kind.__name__} {wanted} in {timeout_s} s; {self.story()}"
        return found()[count - 1]

    def wait_until(self, condition: Callable[[], bool], *, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.story()
            time.sleep(0.005)

    def kill(self, worker: int, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[worker].send_signal(number)

    def exit_code(self, worker: int, *, timeout_s: float = 60) -> int:
        try:
            return self.processes[worker].wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"worker {worker} did not end; {self.story()}") from None

    def records(self, worker: int) -> list[dict[str, Any]]:
        path = self.folder / f"record-{worker}.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def steps(self, worker: int) -> list[dict[str, Any]]:
        return [record for record in self.records(worker) if record["kind"] == "step"]

    def story(self) -> str:
        logs = {path.name: path.read_text()[-3000:] for path in self.folder.glob("worker-*.log")}
        facts = "\n".join(str(fact) for fact in self.facts)
        return f"facts:\n{facts}\n" + "\n".join(f"--- {name}\n{log}" for name, log in logs.items())

    def close(self) -> None:
        for process in self.processes.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def _listen(self) -> None:
        while True:
            try:
                fact = parse_fact(self._inbox.queue_pop(protocol.INBOX))
            except RuntimeError:
                return
            with self._changed:
                self.facts.append(fact)
                self._changed.notify_all()


@contextmanager
def supervising(folder: Path, **options: Any) -> Iterator[Supervisor]:
    supervisor = Supervisor(folder, **options)
    try:
        yield supervisor
    finally:
        supervisor.close()
