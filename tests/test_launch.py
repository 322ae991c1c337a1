"""A launcher with real workers that speak the protocol and train nothing."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from elastane.cli import main
from elastane.errors import ArgumentError
from elastane.launch.folder import newest_generation, read_launcher
from elastane.launch.jobs import ask, find_job
from elastane.launch.launcher import parse_workers
from elastane.launch.link import connect
from elastane.protocol import Generation, generation_key

WORKER = Path(__file__).parent / "launch_worker.py"
LIMIT_S = 60.0

processes = pytest.mark.processes


class Run:
    """One launcher, started over and over in one run folder."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        self.launcher = None
        self.store = None
        self.output = run_dir.parent / f"{run_dir.name}.txt"

    def start(self, *options, script=(WORKER,)):
        given = [str(one) for one in (*options, "--run-dir", self.run_dir, *script)]
        with self.output.open("ab") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "elastane", "run", *given], stdout=output, stderr=output
            )
        return self

    def meet(self):
        """Connect to the store of the launcher that was just started."""
        self.until(lambda: (r := read_launcher(self.run_dir)) and r.pid == self.launcher.pid)
        self.store = connect(read_launcher(self.run_dir).store, patience_s=LIMIT_S)
        self.store.set_timeout(timedelta(seconds=LIMIT_S))
        return self

    def generation(self, number):
        """Wait for a generation and return it."""
        try:
            self.store.wait([generation_key(number)])
        except dist.DistError:
            pytest.fail(f"no generation {number}:\n{self.text()}")
        return Generation.from_json(self.store.get(generation_key(number)))

    def workers(self):
        """Return pids by worker id, of the launcher's own machine and its companions."""
        found = {}
        for path in (self.run_dir / "agents").glob("*.json"):
            found |= {one["worker"]: one["pid"] for one in json.loads(path.read_text()).values()}
        return found

    def until(self, fact):
        """Wait for something that no event tells of."""
        deadline = time.monotonic() + LIMIT_S
        while not fact():
            if time.monotonic() > deadline or self.launcher.poll() is not None:
                pytest.fail(f"waited in vain, launcher {self.launcher.poll()}:\n{self.text()}")
            time.sleep(0.005)

    def wait(self):
        return self.launcher.wait(LIMIT_S)

    def text(self):
        return self.output.read_text()

    def status(self):
        return ask(find_job(str(self.run_dir)).path, "status").result

    def scale(self, n, **values):
        return ask(find_job(str(self.run_dir)).path, "scale", n=n, **values).result

    def close(self):
        pids = self.workers().values()
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()
        for pid in pids:
            if is_alive(pid):
                os.killpg(pid, signal.SIGKILL)


def is_alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_for_end(pid):
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], LIMIT_S)[0]
    finally:
        os.close(handle)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = Run(tmp_path / f"run-{uuid.uuid4().hex[:8]}")  # the job's name: others' tests run too
    yield one
    one.close()


@processes
def test_workers_start_together_and_the_launcher_ends_with_them(run):
    run.start("--workers", 3, script=(WORKER, "--steps", 50)).meet()

    assert run.generation(1).members == (1, 2, 3)
    assert run.wait() == 0
    assert run.workers() == {}
    assert "[worker 2] generation 1: (1, 2, 3)" in run.text()
    assert "generation 1: (1, 2, 3)" in (run.run_dir / "logs" / "worker-2.out").read_text()


@processes
def test_a_killed_worker_is_named_at_once_and_another_takes_its_slot(run):
    run.start("--workers", 3).meet()
    run.generation(1)
    before = run.workers()

    killed = time.time()
    os.kill(before[2], signal.SIGKILL)
    after = run.generation(2)
    later = run.generation(3)

    print(f"from the kill to the record: {1e3 * (after.time - killed):.1f} ms")
    assert after.members == (1, 3)
    assert (after.cause, after.lost) == ("death", (2,))
    assert after.reason == "worker 2 was killed by SIGKILL; 2 workers now"
    assert after.time - killed < 0.5
    assert (later.members, later.cause, later.lost) == ((1, 3, 4), "join", ())
    assert {1: before[1], 3: before[3]}.items() <= run.workers().items()
    assert "worker 2 was killed by SIGKILL. Last lines of" in run.text()


@processes
def test_two_workers_that_are_killed_at_once_are_both_replaced(run):
    run.start("--workers", 4).meet()
    run.generation(1)
    before = run.workers()
    for worker in (1, 3):
        os.kill(before[worker], signal.SIGKILL)

    run.until(lambda: set(newest_generation(run.run_dir).members) == {2, 4, 5, 6})

    lost = {w for n in (2, 3) for w in run.generation(n).lost}
    assert lost == {1, 3}


# [11]
@processes
def test_scaling_down_dismisses_the_newest_and_scaling_up_brings_others(run):
    run.start("--workers", "1:3").meet()
    run.generation(1)
    before = run.workers()

    assert run.scale(2) == "2 workers wanted, 3 before"
    down = run.generation(2)
    wait_for_end(before[3])
    run.scale(3)
    up = run.generation(3)
    run.scale(1, worker=1)
    named = run.generation(4)

    assert (down.members, down.cause, down.dismissed, down.lost) == ((1, 2), "scale", (3,), ())
    assert (up.members, up.cause) == ((1, 2, 4), "join")
    assert (named.members, set(named.dismissed)) == ((2,), {1, 4})
    with pytest.raises(ArgumentError, match=r"n=4: must be a whole number from 1 to 3"):
        run.scale(4)
    with pytest.raises(ArgumentError, match=r"worker=99: no worker of this id lives"):
        run.scale(1, worker=99)


@processes
def test_a_worker_that_asks_to_leave_is_dismissed_and_replaced(run):
    run.start("--workers", 2).meet()
    run.generation(1)

    os.kill(run.workers()[1], signal.SIGUSR1)
    left = run.generation(2)
    later = run.generation(3)

    assert (left.members, left.cause, left.dismissed, left.lost) == ((2,), "leave", (1,), ())
    assert "told by a signal" in left.reason
    assert later.members == (2, 3)


@processes
def test_status_tells_who_trains_and_what_changed_last(run):
    run.start("--workers", 2).meet()
    run.generation(1)
    run.until(lambda: run.status()["last_change"]["pause_s"] is not None)
    run.until(lambda: run.status()["lr"] is not None)

    status = run.status()

    assert (status["state"], status["generation"], status["target"]) == ("running", 1, 2)
    assert [(w["worker"], w["rank"], w["state"]) for w in status["workers"]] == [
        (1, 0, "training"),
        (2, 1, "training"),
    ]
    assert {w["worker"]: w["pid"] for w in status["workers"]} == run.workers()
    assert status["workers"][0]["host"] == socket.gethostname()
    assert status["last_change"]["cause"] == "start"
    assert (status["lr"], status["gain"]) == (0.5, None)


@processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_job_as_agreed(run, number):
    run.start("--workers", 2).meet()
    run.generation(1)
    before = run.workers()

    run.launcher.send_signal(number)

    assert run.wait() == 0
    last = newest_generation(run.run_dir)
    assert (last.members, last.cause, set(last.dismissed)) == ((), "stop", {1, 2})
    assert not any(is_alive(pid) for pid in before.values())
    assert read_launcher(run.run_dir).state == "stopped"


@processes
def test_a_second_interrupt_kills(run):
    run.start("--workers", 2).meet()
    run.generation(1)
    before = run.workers()
    for pid in before.values():
        os.kill(pid, signal.SIGSTOP)

    run.launcher.send_signal(signal.SIGINT)
    run.generation(2)
    run.launcher.send_signal(signal.SIGINT)

    assert run.wait() == 130
    assert not any(is_alive(pid) for pid in before.values())


@processes
def test_a_launcher_that_is_started_again_adopts_the_workers_that_live(run):
    run.start("--workers", 3).meet()
    run.generation(1)
    before = run.workers()

    run.launcher.kill()
    run.launcher.wait()
    os.kill(before[2], signal.SIGKILL)
    run.start("--workers", 3).meet()
    lost = run.generation(2)
    joined = run.generation(3)

    assert (lost.members, lost.cause, lost.lost) == ((1, 3), "lost", (2,))
    assert joined.members == (1, 3, 4)
    after = run.workers()
    assert {1: before[1], 3: before[3]}.items() <= after.items()
    os.kill(after[1], signal.SIGKILL)
    assert run.generation(4).lost == (1,)
    run.launcher.send_signal(signal.SIGTERM)
    assert run.wait() == 0


@processes
def test_everybody_killed_and_started_again_goes_on_counting(run):
    run.start("--workers", 2).meet()
    run.generation(1)
    before = run.workers()
    run.launcher.kill()
    run.launcher.wait()
    for pid in before.values():
        os.killpg(pid, signal.SIGKILL)

    run.start("--workers", 2).meet()
    again = run.generation(2)

    assert (again.members, again.cause, again.lost) == ((3, 4), "start", (1, 2))


@processes
@pytest.mark.parametrize("everybody", [True, False])
def test_a_first_number_counts_again_only_where_no_worker_goes_on(run, everybody):
    run.start("--workers", "1:3", "--initial", 2).meet()
    run.generation(1)
    before = run.workers()
    run.launcher.kill()
    run.launcher.wait()
    for pid in before.values() if everybody else ():
        os.killpg(pid, signal.SIGKILL)

    run.start("--workers", "1:3", "--initial", 1).meet()

    assert run.status()["target"] == (1 if everybody else 2)


@processes
def test_when_all_workers_die_all_are_started_again(run):
    run.start("--workers", 2).meet()
    run.generation(1)
    for pid in run.workers().values():
        os.kill(pid, signal.SIGKILL)

    run.until(lambda: newest_generation(run.run_dir).members == (3, 4))

    assert newest_generation(run.run_dir).cause == "start"


@processes
def test_a_stopped_worker_is_left_behind_and_comes_back_as_a_newcomer(run):
    run.start("--workers", 2, "--hang-limit", 1).meet()
    run.generation(1)
    before = run.workers()

    os.kill(before[1], signal.SIGSTOP)
    hang = run.generation(2)
    os.kill(before[1], signal.SIGCONT)
    back = run.generation(3)

    assert (hang.members, hang.cause, hang.lost) == ((2,), "hang", (1,))
    assert (back.members, back.cause) == ((2, 1), "join")
    assert run.workers() == before


@processes
def test_a_worker_that_stays_stopped_is_replaced(run):
    run.start("--workers", 2, "--hang-limit", 1).meet()
    run.generation(1)

    os.kill(run.workers()[1], signal.SIGSTOP)

    assert run.generation(2).lost == (1,)
    assert run.generation(3).members == (2, 3)


@processes
def test_a_group_that_broke_without_a_death_meets_again(run):
    run.start("--workers", 2, script=(WORKER, "--breaks-once")).meet()

    again = run.generation(2)

    assert (again.members, again.cause, again.lost) == ((1, 2), "broken", ())


@processes
def test_a_second_machine_joins_and_leaves(run):
    run.start("--workers", "1:3", "--slots", 2).meet()
    first = run.generation(1)
    address = read_launcher(run.run_dir).store
    with (run.run_dir.parent / "joined.txt").open("wb") as output:
        join = ["run", "--join", address, "--slots", "2", str(WORKER)]
        agent = subprocess.Popen(
            [sys.executable, "-m", "elastane", *join], stdout=output, stderr=output
        )
    try:
        joined = run.generation(2)
        agent.send_signal(signal.SIGTERM)
        left = run.generation(3)
        code = agent.wait(LIMIT_S)
    finally:
        agent.kill()
        agent.wait()

    assert (first.members, joined.members) == ((1, 2), (1, 2, 3))
    assert (left.members, left.cause, left.dismissed) == ((1, 2), "leave", (3,))
    assert code == 0


@processes
def test_a_lost_machine_costs_its_workers_only(run):
    run.start("--workers", "1:2", "--slots", 1, "--heartbeat-limit", 0.6).meet()
    run.generation(1)
    address = read_launcher(run.run_dir).store
    with (run.run_dir.parent / "joined.txt").open("wb") as output:
        join = ["run", "--join", address, "--slots", "1", str(WORKER)]
        agent = subprocess.Popen(
            [sys.executable, "-m", "elastane", *join], stdout=output, stderr=output
        )
    try:
        assert run.generation(2).members == (1, 2)
        agent.send_signal(signal.SIGSTOP)
        lost = run.generation(3)
        agent.send_signal(signal.SIGCONT)
        back = run.generation(4)
        run.launcher.send_signal(signal.SIGTERM)
        codes = run.wait(), agent.wait(LIMIT_S)
    finally:
        agent.kill()
        agent.wait()

    assert (lost.members, lost.cause, lost.lost) == ((1,), "lost", (2,))
    assert back.members == (1, 2)
    assert codes == (0, 0)


@processes
def test_an_agent_elsewhere_finds_a_launcher_that_is_started_again(run):
    run.start("--workers", "2:3", "--slots", 1).meet()
    address = read_launcher(run.run_dir).store
    with (run.run_dir.parent / "joined.txt").open("wb") as output:
        join = ["run", "--join", address, "--slots", "1", str(WORKER)]
        agent = subprocess.Popen(
            [sys.executable, "-m", "elastane", *join], stdout=output, stderr=output
        )
    try:
        first = run.generation(1)
        before = run.workers()
        run.launcher.kill()
        run.launcher.wait()
        run.start("--workers", "2:3", "--slots", 2).meet()
        grown = run.generation(2)
        run.launcher.send_signal(signal.SIGTERM)
        codes = run.wait(), agent.wait(LIMIT_S)
    finally:
        agent.kill()
        agent.wait()

    assert "at least 2 workers are wanted and the machines have 1 slots" in run.text()
    assert (first.members, grown.members) == ((1, 2), (1, 2, 3))
    assert (grown.cause, grown.lost) == ("join", ())
    assert before.keys() == {1, 2}
    assert codes == (0, 0)


SESSIONLESS = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
total = __import__("torch").ones(1)
dist.all_reduce(total)
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("rank", rank, "of", int(total), "attempt", attempt, flush=True)
if attempt == "0":
    sys.exit(5 if rank == "1" else 0)
"""


@processes
def test_a_script_without_a_session_runs_and_restarts_as_under_torchrun(run):
    script = run.run_dir.parent / "plain.py"
    script.write_text(SESSIONLESS)

    run.start("--workers", 2, script=(script,))

    assert run.wait() == 0
    assert "rank 0 of 2 attempt 1" in run.text()
    assert "rank 1 of 2 attempt 1" in run.text()
    assert "opened an elastane.Session" in run.text()
    assert not (run.run_dir / "generations.jsonl").exists()


@processes
def test_a_crash_at_every_start_ends_with_the_reason(run):
    options = ("--workers", 2, "--max-respawns", 1)
    run.start(*options, script=(WORKER, "--dies-at-start"))

    assert run.wait() == 1
    found = re.search(r"failed: (.*)\n.*worker-\d\.err:\n.*no luck today", run.text())
    assert found is not None, run.text()
    assert "started anew 1 times and died again" in found[1]
    assert read_launcher(run.run_dir).state == "failed"


@processes
def test_a_run_folder_has_one_launcher(run):
    run.start("--workers", 1).meet()
    run.generation(1)

    second = subprocess.run(
        [sys.executable, "-m", "elastane", "run", "--run-dir", str(run.run_dir), str(WORKER)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )

    assert second.returncode == 2
    assert "another launcher runs in this folder" in second.stderr


# [12]
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0", str(WORKER)], "workers='0': must be N, or MIN:MAX"),
        (["--workers", "3:2", str(WORKER)], "workers='3:2': must be N, or MIN:MAX"),
        (["--workers", "2:4", "--initial", "1", str(WORKER)], "initial=1: must be from 2 to 4"),
        (["--join", "here", str(WORKER)], "join='here': must be HOST:PORT"),
        (["nothing.py"], "script='nothing.py': there is no such file"),
    ],
)
def test_arguments_are_refused_with_the_rule(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    refused = CliRunner().invoke(main, ["run", *arguments])

    assert refused.exit_code == 2
    assert message in refused.output
    assert list(tmp_path.iterdir()) == []


# [12]
def test_workers_are_a_number_or_a_range():
    assert (parse_workers("4"), parse_workers("2:8")) == ((1, 4), (2, 8))
