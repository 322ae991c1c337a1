"""A supervisor whose every decision is the test's: real workers, a real store, scripted members."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Condition, Thread
from typing import Any
from unittest.mock import patch

from elastic_worker import Options, name_of, run

from elastane import protocol
from elastane._compat import TCPStore
from elastane._env import ElasticLaunch
from elastane.protocol import Beat, Entered, Generation, Message, Ready, parse_fact

Record = dict[str, Any]

LIMIT_S = 90
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch.distributed", "torch.optim", "elastane.session", "sklearn.datasets"]
)


class Supervisor:
    """Starts workers and publishes the generations that a test asks for.

    Args:
        folder: for records and logs; the run's folder is `run` in it.
        launch: further fields of `ElasticLaunch`. With a `group_size` each worker has as many
            processes: `processes` holds the first of each, `followers` the others.
    """

    def __init__(self, folder: Path, **launch: Any) -> None:
        self.folder = folder
        self.processes: dict[int, BaseProcess] = {}
        self.followers: dict[int, list[BaseProcess]] = {}
        self.facts: list[Message] = []
        self.generations: list[Generation] = []
        self.group_size = launch.get("group_size", 1)
        self._launch = {"expected_workers": 2, "max_workers": 4, "beat_interval_s": 0.05, **launch}
        self._changed = Condition()
        self._port = 0
        self.open_store()

    @property
    def generation(self) -> Generation:
        return self.generations[-1] if self.generations else Generation()

    def open_store(self) -> None:
        """Open a store: the first one, or an empty one in the place of one that was lost."""
        self.store = TCPStore(
            "127.0.0.1",
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(days=1),
        )
        self._port = self.store.port
        self._inbox = self.store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._listener = Thread(target=self._listen, args=(self._inbox,), daemon=True)
        self._listener.start()

    def lose_store(self) -> None:
        del self.store
        self._listener.join(LIMIT_S)
        del self._inbox

    def start(self, *workers: int, is_fresh: bool = False, **options: Any) -> None:
        """Start workers.

        Args:
            workers: their ids.
            is_fresh: start an interpreter for each, which also ends as one; slower.
            options: of `elastic_worker.Options`.
        """
        context = multiprocessing.get_context("spawn") if is_fresh else CONTEXT
        for worker in workers:
            launch = ElasticLaunch(
                store=f"127.0.0.1:{self._port}",
                job="test",
                worker=worker,
                agent="test",
                slot=worker,
                run_dir=str(self.folder / "run"),
                **self._launch,
            )
            # Without the last, torch looks names up in vain, now and then for seconds.
            environment = launch.environment() | {"RES_OPTIONS": "attempts:0"}
            arguments = self.folder, environment, Options(**options)
            team = [
                context.Process(target=run, args=arguments, kwargs={"index": index})
                for index in range(launch.group_size)
            ]
            self.processes[worker], *self.followers[worker] = team
            with patch.dict(os.environ, TORCH_CPP_LOG_LEVEL="ERROR"):
                for process in team:
                    process.start()

    def begin(self, *workers: int, **options: Any) -> Generation:
        """Start workers and let them in as the job's first members."""
        self.start(*workers, **options)
        self.wait_ready(*workers)
        return self.change(*workers, cause="start")

    def publish(self, *members: int, cause: str = "join", **fields: Any) -> Generation:
        known = {worker for one in self.generations for worker in one.members}
        self.wait_ready(*(worker for worker in members if worker not in known))
        number = self.generation.number + 1
        generation = Generation(
            number=number, members=members, cause=cause, time=time.time(), **fields
        )
        self.generations.append(generation)
        self.store.set(protocol.generation_key(number), generation.to_json())
        self.store.set(protocol.NOW, generation.to_json())
        return generation

    def change(self, *members: int, **fields: Any) -> Generation:
        """Publish a generation and wait until its members are in."""
        generation = self.publish(*members, **fields)
        self.wait_entered()
        return generation

    def wait_entered(self) -> None:
        number = self.generation.number
        for worker in self.generation.members:
            self.wait_for(Entered, worker=worker, generation=number)

    def wait_ready(self, *workers: int, count: int = 1, timeout_s: float = LIMIT_S) -> None:
        for worker in workers:
            self.wait_for(Ready, worker=worker, count=count, timeout_s=timeout_s)

    def wait_for(
        self, kind: type[Message], *, timeout_s: float = LIMIT_S, count: int = 1, **wanted: Any
    ) -> Any:
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

    def wait_until(self, condition: Callable[[], bool], *, timeout_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.story()
            time.sleep(0.01)

    def beat(self, worker: int) -> Beat:
        key = protocol.beat_key(worker)
        self.wait_until(lambda: self.store.check([key]))
        return Beat.from_json(self.store.get(key))

    def let_train(self, *workers: int, steps: int = 10) -> None:
        """Wait until workers have committed some more steps."""
        for worker in workers:
            begun = self.beat(worker).step
            self.wait_until(lambda w=worker, n=begun: self.beat(w).step >= n + steps)

    def wait_held(self, gate: str | int, *workers: int) -> None:
        """Wait until workers wait at a gate."""
        self.store.wait([f"held/{gate}/{w}" for w in workers], timedelta(seconds=LIMIT_S))

    def open_gate(self, gate: str | int) -> None:
        """Let workers go on, each once it has heard of the newest generation."""
        number = self.generations[-1].number if self.generations else 0
        self.store.set(f"gate/{gate}", str(number))

    def send_signal(self, number: signal.Signals, *workers: int) -> None:
        for worker in workers:
            pid = self.processes[worker].pid
            assert pid is not None
            os.kill(pid, number)

    def kill(self, *workers: int) -> None:
        """End workers and all that they have started, as an agent does, and see it done."""
        self.kill_rest(*workers)
        for worker in workers:
            assert self.exit_code(worker) == -signal.SIGKILL

    def kill_rest(self, *workers: int) -> None:
        """End what is left of workers."""
        for worker in workers:
            for process in self.team(worker):
                _kill_group(process)
                process.join()

    def team(self, worker: int) -> list[BaseProcess]:
        return [self.processes[worker], *self.followers[worker]]

    def exit_codes(self, worker: int) -> list[int]:
        """Return the exit codes of a worker's processes; wait for all of them."""
        for process in self.team(worker):
            process.join(LIMIT_S)
        codes = [process.exitcode for process in self.team(worker)]
        assert None not in codes, f"worker {worker} did not end: {codes}; {self.story()}"
        return [code for code in codes if code is not None]

    def exit_code(self, worker: int) -> int:
        return self.exit_codes(worker)[0]

    def finish(self) -> None:
        """End the run; its members must agree on the end and leave with exit code 0."""
        (self.folder / "stop").touch()
        for worker in self.generation.members:
            assert set(self.exit_codes(worker)) == {0}, self.story()

    def log(self, worker: int) -> str:
        names = self._names(worker)
        return "".join((self.folder / f"worker-{name}.log").read_text() for name in names)

    def complaints(self, *workers: int) -> list[str]:
        """Return what in the workers' logs are errors and warnings of Python."""
        lines = [line for worker in workers for line in self.log(worker).splitlines()]
        return [line for line in lines if "Traceback" in line or "Warning:" in line]

    def _names(self, worker: int) -> list[str]:
        return [name_of(worker, index) for index in range(self.group_size)]

    def records(self, worker: int, kind: str) -> list[Record]:
        names = [self.folder / f"record-{name}.jsonl" for name in self._names(worker)]
        texts = [path.read_text() for path in names if path.exists()]
        lines = [line for text in texts for line in text.splitlines()]
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [record for record in records if record["kind"] == kind]

    def all_records(self, kind: str) -> list[Record]:
        return [record for worker in self.processes for record in self.records(worker, kind)]

    def story(self) -> str:
        """Return all that is known, for the message of a test that fails."""
        for process in self._all_processes():
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)  # it writes its stacks into its log
        time.sleep(0.2)
        logs = {path.name: path.read_text()[-3000:] for path in self.folder.glob("worker-*.log")}
        facts = "\n".join(dict.fromkeys(map(str, self.facts)))
        return f"facts:\n{facts}\n" + "\n".join(f"--- {name}\n{log}" for name, log in logs.items())

    def close(self) -> None:
        for process in self._all_processes():
            _kill_group(process)
            process.join()

    def _all_processes(self) -> list[BaseProcess]:
        return [process for worker in self.processes for process in self.team(worker)]

    def _listen(self, inbox: TCPStore) -> None:
        with suppress(RuntimeError):  # the store was closed
            while True:
                fact = parse_fact(inbox.queue_pop(protocol.INBOX))
                with self._changed:
                    self.facts.append(fact)
                    self._changed.notify_all()


def _kill_group(process: BaseProcess) -> None:
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def supervising(folder: Path, **launch: Any) -> Iterator[Supervisor]:
    supervisor = Supervisor(folder, **launch)
    try:
        yield supervisor
    finally:
        supervisor.close()
