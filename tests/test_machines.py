"""A job on several machines, driven by a file of hosts, through everything that may befall one."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from elastic_audit import audit
from machines import (
    Loopbacks,
    Namespaces,
    command_of,
    kill,
    processes,
    why_no_namespaces,
    why_no_sshd,
)

from elastane.launch.folder import newest_generation, tail_of
from elastane.launch.hosts_log import log_of, read_changes

SCRIPT = Path(__file__).parent / "machine_worker.py"
LIMIT_S = 100.0

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


class Fleet:
    """A job whose machines are the lines of a file."""

    def __init__(self, folder, *, ssh):
        self.folder = folder
        self.run_dir = folder / f"fleet-{folder.parent.name[-8:]}"
        self.hosts = folder / "hosts.txt"
        self.output = folder / "launcher.txt"
        self.launcher = None
        self._ssh = ssh

    def start(self, *options):
        command = [
            *(sys.executable, "-m", "elastane", "run", "--hosts", self.hosts, "--workers", "1:4"),
            *("--run-dir", self.run_dir, "--ssh", self._ssh, "--heartbeat-limit", "1.5"),
            *("--hang-limit", "20", *options, SCRIPT, self.folder),
        ]
        with self.output.open("ab") as output:
            self.launcher = subprocess.Popen(
                [str(word) for word in command], stdout=output, stderr=output
            )

    def write(self, *lines):
        """Replace the file, as editors do."""
        part = self.hosts.with_suffix(".part")
        part.write_text("".join(f"{line}\n" for line in lines))
        part.replace(self.hosts)

    def generation(self, *, workers, newer_than=0):
        """Wait for a generation with so many workers, all of which train in it; return it."""

        def found():
            now = newest_generation(self.run_dir)
            if now.number <= newer_than or len(now.members) != workers:
                return None
            return now if all(self.trains(one, now.number) for one in now.members) else None

        return self.until(found)

    def trains(self, worker, generation):
        """Return whether a worker's last step was made in a generation."""
        path = self.folder / f"record-{worker}.jsonl"
        steps = [line for line in tail_of(path).splitlines() if '"kind": "step"' in line]
        return f'"generation": {generation},' in "".join(steps[-1:])

    def until(self, fact):
        """Wait for something that no event tells of, and return it."""
        deadline = time.monotonic() + LIMIT_S
        while not (found := fact()):
            if time.monotonic() > deadline or self.launcher.poll() is not None:
                pytest.fail(f"waited in vain, launcher {self.launcher.poll()}:\n{self.story()}")
            time.sleep(0.1)
        return found

    def changes(self):
        return [(one.change, one.host) for one in read_changes(log_of(self.hosts))]

    def all_records(self, kind):
        records = []
        for path in sorted(self.folder.glob("record-*.jsonl")):
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            records += [one for one in map(json.loads, lines) if one["kind"] == kind]
        return records

    def workers(self, agent):
        path = self.run_dir / "agents" / f"{agent}.json"
        return {one["worker"]: one["pid"] for one in json.loads(path.read_text()).values()}

    def agent(self, name):
        """Return the process id of an agent."""
        (pid,) = [pid for pid in self.agents() if f"--agent\0{name}\0" in command_of(pid)]
        return pid

    def agents(self):
        """Return the process ids of all agents of the job."""
        mark = f"--lifeline\0{SCRIPT}\0{self.folder}\0"
        return [pid for pid in processes() if command_of(pid).endswith(mark)]

    def processes(self):
        """Return the process ids of all agents and workers of the job."""
        return [pid for pid in processes() if f"{SCRIPT}\0{self.folder}\0" in command_of(pid)]

    def kill_machine(self, name):
        """End an agent and its workers at once."""
        kill([self.agent(name), *self.workers(name).values()])

    def finish(self):
        """End training, and return the launcher's exit code."""
        (self.folder / "stop").touch()
        return self.launcher.wait(LIMIT_S)

    def until_gone(self):
        """Wait until agents and workers have ended."""
        deadline = time.monotonic() + LIMIT_S
        while pids := self.processes():
            assert time.monotonic() < deadline, [command_of(pid) for pid in pids]
            time.sleep(0.02)

    def story(self):
        logs = self.run_dir.glob("logs/*.err")
        text = "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in logs)
        log = log_of(self.hosts)
        changes = log.read_text() if log.exists() else ""
        return f"{self.output.read_text()[-6000:]}\n{changes}\n{text}"

    def close(self):
        """Leave no process behind."""
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()
        kill(self.agents())
        kill(self.processes())


@pytest.fixture
def fleet_on(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    @contextmanager
    def running(machines):
        folder = tmp_path / "job"
        folder.mkdir()
        with machines.running():
            fleet = Fleet(folder, ssh=machines.ssh)
            try:
                yield fleet
            finally:
                fleet.close()

    return running


def test_machines_come_go_die_fall_silent_and_the_launchers_own_is_lost(tmp_path, fleet_on):
    if why := why_no_namespaces():
        pytest.skip(why)
    machines = Namespaces(tmp_path / "net", num_machines=2)
    first, second = machines.addresses
    with fleet_on(machines) as fleet:
        fleet.write("localhost", first)
        fleet.start()
        begun = fleet.generation(workers=2)
        fleet.write("localhost", first, second)
        grown = fleet.generation(workers=3, newer_than=begun.number)
        assert grown.cause == "join"

        dead, zombie = fleet.workers(first), fleet.workers(second)
        fleet.kill_machine(first)
        machines.set_link(second, "down")
        fleet.until(lambda: {("FAILED", first), ("FAILED", second)} <= set(fleet.changes()))
        alone = fleet.generation(workers=1, newer_than=grown.number)
        machines.set_link(second, "up")
        back = fleet.generation(workers=3, newer_than=alone.number)
        assert set(back.members) & {*dead, *zombie} == set(zombie)
        assert fleet.workers(second) == zombie
        assert {("ADDED", first), ("ADDED", second)} <= set(fleet.changes()[-2:])

        before = fleet.workers(first) | fleet.workers(second)
        own = fleet.workers("localhost")
        fleet.launcher.kill()
        fleet.launcher.wait()
        fleet.kill_machine("localhost")
        fleet.start()
        whole = fleet.generation(workers=3, newer_than=back.number + 1)
        assert set(back.members) - set(whole.members) == set(own)
        assert fleet.workers(first) | fleet.workers(second) == before

        fleet.write(first, second)
        left = fleet.generation(workers=2, newer_than=whole.number)
        assert (left.cause, left.lost) == ("leave", ())
        fleet.until(lambda: fleet.changes()[-1] == ("REMOVED", "localhost"))
        assert fleet.finish() == 0
        fleet.until_gone()
        numbers = [one.number for one in read_changes(log_of(fleet.hosts))]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(audit(fleet)) > 100


def test_machines_under_other_names_of_this_one_come_die_and_go(tmp_path, fleet_on):
    if why := why_no_sshd():
        pytest.skip(why)
    machines = Loopbacks(tmp_path / "net", num_machines=3)
    first, second, third = machines.addresses
    with fleet_on(machines) as fleet:
        fleet.write(first, second)
        fleet.start("--prepare", f"touch {fleet.folder}/prepared-{{host}}; [ {{host}} != {third} ]")
        begun = fleet.generation(workers=2)
        machines.end_clients()
        fleet.until(lambda: fleet.output.read_text().count("as long as it is heard") == 2)
        assert fleet.changes().count(("FAILED", first)) == 0

        fleet.kill_machine(second)
        mended = fleet.generation(workers=2, newer_than=begun.number + 1)
        fleet.write(second, third)
        left = fleet.generation(workers=1, newer_than=mended.number)
        fleet.until(lambda: {("REMOVED", first), ("FAILED", third)} <= set(fleet.changes()))

        assert (left.cause, left.lost) == ("leave", ())
        assert len(list(fleet.folder.glob("prepared-127.*"))) == 3
        assert fleet.finish() == 0
        fleet.until_gone()
        assert len(audit(fleet)) > 10
