"""The supervisor's parts on their own: slots with real processes, console, run folder, clock."""

import io
import json
import os
import select
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from elastane.cli import main
from elastane.errors import ArgumentError, StateError
from elastane.launch.clock import AwakeClock
from elastane.launch.console import Console
from elastane.launch.desk import Desk
from elastane.launch.facts import restart_delay_s
from elastane.launch.folder import (
    LauncherRecord,
    add_generation,
    lock_agent,
    lock_run,
    log_paths,
    newest_generation,
    read_agent,
    read_launcher,
    tail_of,
    write_launcher,
)
from elastane.launch.link import JOB_KEY, connect, parse_address, serve
from elastane.launch.slots import Ended, Slots
from elastane.protocol import Beat, Generation, beat_key, heartbeat_key

LIMIT_S = 30.0

WITH_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


def slots_for(tmp_path, script):
    return Slots(tmp_path, command=(sys.executable, "-u", "-c", script))


def wait_for_ends(slots, number):
    ends = []
    deadline = time.monotonic() + LIMIT_S
    while len(ends) < number and time.monotonic() < deadline:
        ends = slots.wait(LIMIT_S)
    return ends


def wait_for_line(path):
    deadline = time.monotonic() + LIMIT_S
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return path.read_text().strip()


def wait_until_gone(pid):
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], LIMIT_S)[0], f"process {pid} lives"
    finally:
        os.close(handle)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(7)", 7),
        ("raise ValueError('wrong')", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
    ],
)
def test_the_end_of_a_worker_is_seen_with_its_exit_code(tmp_path, script, code):
    with slots_for(tmp_path, script) as slots:
        slots.start(2, worker=5, environments=[{}])
        assert wait_for_ends(slots, 1) == [Ended(worker=5, slot=2, code=code)]
        slots.bury(2)

        assert slots.workers == {}
    assert ("wrong" in tail_of(log_paths(tmp_path, 5)[1])) is (code == 1)


@pytest.mark.processes
def test_starting_a_worker_leaves_the_signal_handlers_alone(tmp_path):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    with slots_for(tmp_path, "pass") as slots:
        slots.start(0, worker=1, environments=[{}])
        wait_for_ends(slots, 1)

        assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.processes
def test_a_worker_sees_its_environment_and_leads_a_process_group(tmp_path):
    script = "import os; print(os.environ['MARK'], os.getpid() == os.getpgid(0) == os.getsid(0))"
    with slots_for(tmp_path, script) as slots:
        slots.start(0, worker=1, environments=[{"MARK": "here"}])
        wait_for_ends(slots, 1)

    assert log_paths(tmp_path, 1)[0].read_text() == "here True\n"


@pytest.mark.processes
def test_what_a_dead_worker_started_dies_with_it(tmp_path):
    with slots_for(tmp_path, WITH_A_CHILD) as slots:
        process = slots.start(0, worker=1, environments=[{}])
        child = int(wait_for_line(log_paths(tmp_path, 1)[0]))
        os.kill(process.pid, signal.SIGKILL)
        wait_for_ends(slots, 1)
        slots.bury(0)

        wait_until_gone(child)


SECOND_FAILS = """
import os, time
if os.environ["ELASTANE_GROUP_INDEX"] == "1":
    raise SystemExit(5)
time.sleep(600)
"""

SECOND_ENDS_FIRST = """
import os, time
if os.environ["ELASTANE_GROUP_INDEX"] == "0":
    time.sleep(0.5)
print("end")
"""


def two_processes():
    return [{"ELASTANE_GROUP_INDEX": str(index)} for index in range(2)]


@pytest.mark.processes
def test_a_process_that_fails_ends_its_worker_and_the_others_with_it(tmp_path):
    with slots_for(tmp_path, SECOND_FAILS) as slots:
        process = slots.start(3, worker=7, environments=two_processes())
        assert wait_for_ends(slots, 1) == [Ended(worker=7, slot=3, code=5, index=1)]
        slots.bury(3)

        wait_until_gone(process.pid)
        assert slots.workers == {}


@pytest.mark.processes
def test_a_worker_whose_processes_end_well_ends_with_the_last_of_them(tmp_path):
    with slots_for(tmp_path, SECOND_ENDS_FIRST) as slots:
        slots.start(0, worker=1, environments=two_processes())
        assert wait_for_ends(slots, 1) == [Ended(worker=1, slot=0, code=0)]

    texts = [log_paths(tmp_path, 1, index=index)[0].read_text() for index in range(2)]
    assert texts == ["end\n", "end\n"]


@pytest.mark.processes
def test_a_worker_that_does_not_listen_is_killed_after_its_grace(tmp_path):
    with slots_for(tmp_path, DEAF) as slots:
        slots.start(0, worker=1, environments=[{}])
        wait_for_line(log_paths(tmp_path, 1)[0])
        begun = time.monotonic()
        slots.end(1, grace_s=0.3)
        ends = []
        while not ends:
            ends = slots.wait(0.05)

        assert ends == [Ended(worker=1, slot=0, code=-9)]
        assert time.monotonic() - begun >= 0.3
        slots.bury(0)


@pytest.mark.processes
def test_leaving_the_block_leaves_no_process_behind(tmp_path):
    with slots_for(tmp_path, WITH_A_CHILD) as slots:
        pids = [slots.start(n, worker=n, environments=[{}]).pid for n in range(2)]
        pids += [int(wait_for_line(log_paths(tmp_path, n)[0])) for n in range(2)]

    for pid in pids:
        wait_until_gone(pid)


@pytest.mark.processes
def test_another_thread_wakes_a_wait(tmp_path):
    with slots_for(tmp_path, "pass") as slots:
        slots.wake()
        begun = time.monotonic()
        assert slots.wait(LIMIT_S) == []
        assert time.monotonic() - begun < LIMIT_S / 2


@pytest.mark.processes
def test_a_worker_that_outlived_its_launcher_is_adopted_and_others_are_not(tmp_path):
    with slots_for(tmp_path, "import time; time.sleep(600)") as first:
        process = first.start(0, worker=1, environments=[{}])
        with slots_for(tmp_path, "pass") as second:
            assert second.adopt(0, worker=1, pids=[process.pid], born=[process.born])
            assert not second.adopt(1, worker=2, pids=[process.pid], born=["1"])
            assert not second.adopt(2, worker=3, pids=[2**22 + 1], born=["1"])
            os.kill(process.pid, signal.SIGKILL)

            assert wait_for_ends(second, 1) == [Ended(worker=1, slot=0, code=None)]


@pytest.mark.processes
def test_a_worker_of_which_a_process_is_gone_is_not_adopted_but_ended(tmp_path):
    with slots_for(tmp_path, "import time; time.sleep(600)") as first:
        process = first.start(0, worker=1, environments=[{}, {}])
        pids, born = zip(*[(one.pid, one.born) for one in process.team], strict=True)
        with slots_for(tmp_path, "pass") as second:
            assert second.adopt(0, worker=1, pids=pids, born=born)
            os.kill(pids[1], signal.SIGKILL)
            wait_until_gone(pids[1])
            assert not second.adopt(1, worker=1, pids=pids, born=born)
            wait_until_gone(pids[0])

            assert wait_for_ends(second, 1) == [Ended(worker=1, slot=0, code=None)]


def test_the_console_names_the_worker_in_every_line(tmp_path):
    out, err = io.StringIO(), io.StringIO()
    paths = log_paths(tmp_path, 3)
    paths[0].parent.mkdir()
    with Console(tmp_path, out=out, err=err) as console:
        console.follow(3)
        paths[0].write_bytes(b"one\ntwo \xff\nno end")
        paths[1].write_text("trouble\n")
        console.say("two\nlines")
        console.leave(3)

    assert out.getvalue() == "[worker 3] one\n[worker 3] two \ufffd\n[worker 3] no end\n"
    assert err.getvalue() == "[elastane] two\n[elastane] lines\n[worker 3] trouble\n"


def test_the_console_names_each_process_of_a_worker(tmp_path):
    out = io.StringIO()
    log_paths(tmp_path, 3)[0].parent.mkdir()
    with Console(tmp_path, out=out) as console:
        console.follow(3, group_size=2)
        for index in range(2):
            log_paths(tmp_path, 3, index=index)[0].write_text(f"{index}\n")
        console.leave(3)

    assert out.getvalue() == "[worker 3] 0\n[worker 3.1] 1\n"


def test_the_console_shows_only_what_is_new_of_an_adopted_worker(tmp_path):
    out, err = io.StringIO(), io.StringIO()
    path, _ = log_paths(tmp_path, 3)
    path.parent.mkdir()
    path.write_text("old\n")
    with Console(tmp_path, out=out, err=err) as console:
        console.follow(3, from_end=True)
        console._show_all()
        with path.open("a") as file:
            file.write("new\n")

    assert out.getvalue() == "[worker 3] new\n"


def test_a_console_that_is_gone_ends_nothing(tmp_path):
    class Gone(io.StringIO):
        def write(self, _text):
            raise BrokenPipeError

    with Console(tmp_path, out=Gone(), err=Gone()) as console:
        console.say("nobody hears")


def test_a_run_folder_is_locked_by_one_launcher(tmp_path):
    with (
        lock_run(tmp_path),
        pytest.raises(ArgumentError, match="another launcher runs in this folder"),
        lock_run(tmp_path),
    ):
        pass
    with lock_run(tmp_path):
        pass


def test_agents_of_one_host_have_different_names(tmp_path):
    with lock_agent(tmp_path, host="host") as first, lock_agent(tmp_path, host="host") as second:
        assert (first, second) == ("host", "host-2")
    with lock_agent(tmp_path, host="host") as again:
        assert again == "host"
    assert read_agent(tmp_path, "host") == {}


def test_a_torn_last_line_of_the_history_is_passed_over(tmp_path):
    assert newest_generation(tmp_path) == Generation()
    for number in (1, 2):
        add_generation(tmp_path, Generation(number=number, members=(number,)))
    with (tmp_path / "generations.jsonl").open("a") as file:
        file.write('{"kind": "generation", "num')

    assert newest_generation(tmp_path) == Generation(number=2, members=(2,))


def test_a_record_that_is_none_is_named(tmp_path):
    record = LauncherRecord(job="j", pid=1, store="127.0.0.1:1", agents=["a"])
    write_launcher(tmp_path, record)
    assert read_launcher(tmp_path) == record
    (tmp_path / "launcher.json").write_text("[]")

    with pytest.raises(StateError, match=r"launcher\.json is no launcher's record"):
        read_launcher(tmp_path)


def test_a_long_log_is_cut_to_its_last_lines(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f"line {n}\n" for n in range(10_000)))

    assert tail_of(path, lines=2) == "line 9998\nline 9999"
    assert tail_of(tmp_path / "none") == ""


def test_the_clock_does_not_count_the_time_in_which_the_process_stood_still():
    beneath = iter([10.0, 10.2, 99.0, 99.1])
    clock = AwakeClock(source=lambda: next(beneath))

    assert [round(clock.now(), 6) for _ in range(3)] == [0.2, 0.7, 0.8]


def test_delays_grow_and_end():
    assert [restart_delay_s(n) for n in (0, 1, 2, 7, 1000)] == [0.0, 0.5, 1.0, 30.0, 30.0]


@pytest.mark.parametrize("text", ["host", "host:", ":80", "host:x", "host:0", "host:65536"])
def test_an_address_is_a_host_and_a_port(text):
    with pytest.raises(ArgumentError, match="must be HOST:PORT"):
        parse_address(text)


def test_addresses_of_both_kinds_are_understood():
    assert parse_address("[::1]:80") == ("::1", 80)
    assert parse_address("machine:29500") == ("machine", 29500)


def test_a_store_that_is_not_there_or_whose_port_is_taken_is_an_error_without_noise(capfd):
    store = serve(0)
    with pytest.raises(OSError, match="in use"):
        serve(store.port, patience_s=0)
    assert connect(f"127.0.0.1:{store.port}").port == store.port
    port = store.port
    del store
    with pytest.raises(ConnectionRefusedError):
        connect(f"127.0.0.1:{port}", patience_s=0)

    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("group_size", [1, 3])
def test_a_machine_that_would_join_with_workers_of_another_size_is_refused(group_size, tmp_path):
    store = serve(0)
    job = {"job": "digits", "run_dir": str(tmp_path / "run"), "max_workers": 4, "group_size": 2}
    store.set(JOB_KEY, json.dumps(job))
    arguments = ["run", "--join", f"127.0.0.1:{store.port}", "--group-size", str(group_size)]

    refused = CliRunner().invoke(main, [*arguments, __file__])

    assert refused.exit_code == 2
    message = f"group_size={group_size}: the workers of job digits have 2 processes"
    assert message in " ".join(refused.output.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_the_supervisor_imports_no_training_code():
    program = (
        "import sys, elastane.launch.launcher\n"
        "own = [m for m in sys.modules if m.startswith('elastane.')]\n"
        "bad = ('session', 'elastic', 'group', 'gradients', 'optim', 'data', 'stepper', 'state')\n"
        "print([m for m in own if m.split('.')[1] in bad])\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert shown.stdout == "[]\n"


def test_a_desk_reads_many_beats_and_waits_for_none_that_is_missing():
    server = serve(0)
    with Desk(f"127.0.0.1:{server.port}", say=print) as desk:
        assert desk.beats([1, 2]) == {}
        assert desk.heartbeats(["here", "there"]) == {}

        beats = {worker: Beat(count=worker, step=3) for worker in range(1, 1_200)}
        for worker, beat in beats.items():
            server.set(beat_key(worker), beat.to_json())
        server.add(heartbeat_key("there"), 4)

        assert desk.beats([5_000, *beats]) == beats
        assert desk.heartbeats(["here", "there"]) == {"there": 4}


def test_a_desk_passes_a_beat_over_that_is_none_and_takes_the_next_one():
    server, said = serve(0), []
    with Desk(f"127.0.0.1:{server.port}", say=said.append) as desk:
        server.set(beat_key(1), "no beat")
        assert desk.beats([1]) == {}
        assert desk.beats([1]) == {}
        server.set(beat_key(1), Beat(count=7).to_json())
        assert desk.beats([1]) == {1: Beat(count=7)}
        server.set(beat_key(1), Beat(count=8).to_json())
        assert desk.beats([1]) == {1: Beat(count=8)}
    assert len(said) == 1
