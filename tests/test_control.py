"""Control of running jobs: the server with a real socket, and the commands that talk to it."""

import errno
import json
import math
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from elastane.cli import control as commands
from elastane.cli import main
from elastane.cli.status_table import age_text
from elastane.errors import ArgumentError, ElastaneError, StateError, UsageError
from elastane.launch import control, jobs, socket_paths
from elastane.launch.control import ControlServer
from elastane.launch.jobs import LAUNCHER_NAME, ask, find_job, wait_until_gone
from elastane.launch.line_server import MAX_LINE_BYTES, LineServer
from elastane.launch.socket_paths import is_live, live_sockets, own_folder, socket_path

LIMIT_S = 30

STATUS = {
    "job": "digits",
    "state": "running",
    "run_dir": "runs/digits",
    "generation": 5,
    "cause": "death",
    "reason": "worker 2 [rank 1] was killed",
    "min_workers": 1,
    "max_workers": 4,
    "target": 3,
    "workers": [
        {
            "worker": worker,
            "agent": "a0",
            "host": "node1",
            "slot": worker,
            "pid": 54321 + worker,
            "rank": rank,
            "state": state,
            "step": 1234,
        }
        for worker, rank, state in ((0, 0, "training"), (1, 1, "training"), (3, None, "warming"))
    ],
    "step": 1234,
    "progress": 1180.5,
    "num_steps": 2500,
    "lr": 0.05,
    "gain": 1.52,
    "batch": 256,
    "samples_per_s": 4321.7,
    "last_change": {
        "generation": 5,
        "cause": "death",
        "reason": "worker 2 was killed",
        "time": 1.0,
        "pause_s": 0.085,
    },
}
UNKNOWN = dict.fromkeys(STATUS) | {"job": "digits", "state": "starting", "workers": []}

LAUNCHER = """
import os, sys, threading
from elastane.launch.control import ControlServer

class Launcher:
    state, ended, stubborn = "running", threading.Event(), {stubborn!r}

    def status(self):
        return {{"job": {job!r}, "state": self.state, "step": 7, "workers": []}}

    def scale(self, n, worker=None):
        return "scaled"

    def stop(self):
        self.state = "stopping"
        if not self.stubborn:
            self.ended.set()
        return "workers write a checkpoint and leave"

    def kill(self):
        os._exit(0)

launcher = Launcher()
with ControlServer(launcher, job={job!r}, run_dir={run_dir!r}) as server:
    print(server.path, flush=True)
    launcher.ended.wait()
"""


class Launched:
    """A small launcher: remembers what it was told, on which thread."""

    def __init__(self, **status):
        self.values = STATUS | status
        self.calls = []
        self.threads = set()

    def status(self):
        self.threads.add(threading.current_thread().name)
        return self.values

    def scale(self, n, worker=None):
        self.threads.add(threading.current_thread().name)
        if n > 4:
            raise ArgumentError(f"n={n}: more than 4 workers. Give at most 4.")
        self.calls.append((n, worker))
        return f"going to {n} workers"

    def stop(self):
        raise StateError("no checkpoint can be written")

    def kill(self):
        raise KeyError("a fault")


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory, monkeypatch):
    """A folder for sockets with a short path, and an empty one for temporary files."""
    folder, temporary = tmp_path_factory.mktemp("r"), tmp_path_factory.mktemp("t")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return folder


@contextmanager
def served(job="digits", *, run_dir="runs/digits", controller=None, **options):
    controller = controller or Launched(job=job)
    with ControlServer(controller, job=job, run_dir=run_dir, **options) as server:
        yield server


@contextmanager
def launcher(job="digits", *, run_dir="runs/digits", stubborn=False):
    script = LAUNCHER.format(job=job, run_dir=str(run_dir), stubborn=stubborn)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline().endswith(".sock\n")
            yield process
        finally:
            process.kill()


def invoke(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def succeed(*args):
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*args, exit_code):
    result = invoke(*args)
    assert result.exit_code == exit_code, result.output
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


@contextmanager
def connected(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(LIMIT_S)
        client.connect(str(path))
        with client.makefile("rb") as answers:
            yield client, answers


def leave_a_dead_socket(job="digits"):
    path = socket_path(job, folder=own_folder())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
    assert path.exists()
    return path


def write_launcher(run_dir, job):
    run_dir.mkdir(exist_ok=True)
    record = {"job": job, "pid": 1, "store": "localhost:1"}
    (run_dir / LAUNCHER_NAME).write_text(json.dumps(record))
    return run_dir


# --- where sockets lie


def test_only_the_user_reaches_the_socket_and_it_goes_with_the_server(runtime):
    with served() as server:
        assert server.path == runtime / "elastane" / "digits.sock"
        assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(server.path.parent.stat().st_mode) == 0o700
    assert list(server.path.parent.iterdir()) == []
    assert "elastane control" not in {thread.name for thread in threading.enumerate()}


def test_the_socket_goes_when_the_block_raises(runtime):
    with pytest.raises(ZeroDivisionError), served():
        _ = 1 / 0
    assert list((runtime / "elastane").iterdir()) == []


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_may_look_into_is_refused(runtime, mode):
    (runtime / "elastane").mkdir()
    (runtime / "elastane").chmod(mode)
    with pytest.raises(UsageError, match=r"folder=.*chmod 700"), served():
        pass
    assert "chmod 700" in refused("ps", exit_code=1)


def test_a_folder_of_another_user_is_refused(monkeypatch):
    monkeypatch.setattr(socket_paths.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(UsageError, match="another user's"), served():
        pass
    assert succeed("ps") == "no job runs\n"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_folder_that_is_none_is_refused(runtime, tmp_path, kind):
    if kind == "link":
        (runtime / "elastane").symlink_to(tmp_path)
    else:
        (runtime / "elastane").write_text("in the way")
    with pytest.raises(UsageError, match="no folder"), served():
        pass


@pytest.mark.parametrize("value", [None, "", "relative", "/nowhere/at/all"])
def test_without_a_runtime_folder_sockets_lie_among_the_temporary_files(monkeypatch, value):
    if value is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    with served() as server:
        assert server.path.parent == Path(tempfile.gettempdir()) / f"elastane-{os.getuid()}"


def test_a_job_of_a_session_without_a_runtime_folder_is_found_all_the_same(runtime, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with served() as server:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        assert find_job("digits").path == server.path
        assert live_sockets() == [server.path]
        with pytest.raises(ArgumentError, match="runs already"), served():
            pass


def test_a_folder_whose_path_is_too_long_is_refused(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(ArgumentError, match=r"more than 100 bytes.*shorter path"), served():
        pass


# --- names of jobs


@pytest.mark.parametrize(
    "job", ["größe-日本", "with space", "a.b", "[red]", "x" * 300, "é" * 100, "4", "~", "Ω\u0301"]
)
def test_a_job_may_have_any_printable_name_of_any_length(job):
    with served(job) as server:
        assert len(os.fsencode(server.path)) <= 100
        assert find_job(job).name == job
        assert succeed("scale", job, 2) == "going to 2 workers\n"
        assert json.loads(succeed("ps", "--json"))[0]["job"] == job


def test_long_names_that_differ_at_the_end_are_two_jobs():
    with served("x" * 200 + "a") as first, served("x" * 200 + "b") as second:
        assert first.path != second.path
        assert find_job("x" * 200 + "b").path == second.path


def test_accents_may_be_typed_in_another_form():
    with served("gro\u0308ße") as server:
        assert find_job("gr\u00f6ße").path == server.path


@pytest.mark.parametrize(
    "job", ["", " ", "a/b", "../x", ".x", "-x", "a\n", "a\x00b", "\udc80", "a "]
)
def test_other_names_are_refused(job):
    with pytest.raises(ArgumentError, match=r"job=.*printable"), served(job):
        pass
    with pytest.raises(ArgumentError, match="no job of this name"):
        find_job(job)


def test_a_name_is_taken_while_its_job_runs():
    with served() as first:
        message = r"job='digits': .*runs already.*elastane stop"
        with pytest.raises(ArgumentError, match=message), served():
            pass
        assert ask(first.path, "hello").job.name == "digits"
        with served("other"):
            assert [path.stem for path in live_sockets()] == ["digits", "other"]
    with served():
        assert is_live(first.path)


def test_the_socket_of_a_dead_launcher_is_replaced():
    path = leave_a_dead_socket()
    with served() as server:
        assert server.path == path
        assert ask(path, "hello").job.pid == os.getpid()


def test_a_killed_launcher_leaves_the_name_free():
    with launcher() as process:
        process.kill()
        process.wait(LIMIT_S)
        assert live_sockets() == []
        with served() as server:
            assert is_live(server.path)


def test_of_many_launchers_at_once_one_gets_the_name():
    leave_a_dead_socket()
    all_have_tried = threading.Barrier(8, timeout=LIMIT_S)

    def attempt(_):
        try:
            with served():
                all_have_tried.wait()
                return True
        except ArgumentError:
            all_have_tried.wait()
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 1


def test_a_server_leaves_a_socket_alone_that_is_no_more_its_own():
    with served() as server:
        server.path.unlink()
        path = leave_a_dead_socket()
    assert path.exists()


def test_a_server_ends_in_peace_when_its_folder_is_gone(runtime):
    with served() as server:
        server.path.unlink()
        server.path.parent.rmdir()
    assert list(runtime.iterdir()) == []


# --- lines of JSON


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"[1]",
        b"null",
        b"\xff\xfe\x00",
        b'{"command": "status"',
        b"{}",
        b'{"command": "fly"}',
        b'{"command": ["status"]}',
        b'{"command": "scale"}',
        b'{"command": "scale", "n": "3"}',
        b'{"command": "scale", "n": 0}',
        b'{"command": "scale", "n": true}',
        b'{"command": "scale", "n": 2, "worker": "x"}',
        b"[" * 60_000,
        b"9" * 60_000,
    ],
)
def test_bad_input_is_answered_and_the_next_line_as_well(line):
    with served() as server, connected(server.path) as (client, answers):
        client.sendall(line + b"\n")
        answer = json.loads(answers.readline())
        assert (answer["ok"], answer["error"]) == (False, "ArgumentError")
        assert answer["message"].isprintable()
        assert len(answer["message"]) < 250
        client.sendall(b'{"command": "status"}\n')
        assert json.loads(answers.readline())["result"] == STATUS


def test_a_line_without_end_is_refused_and_cut_off():
    with served() as server, connected(server.path) as (client, answers):
        client.sendall(b"x" * (MAX_LINE_BYTES + 1))
        assert "65536 bytes" in json.loads(answers.readline())["message"]
        assert answers.read() == b""
        assert ask(server.path, "status").result == STATUS


def test_lines_are_answered_in_their_order_however_they_arrive():
    parts = (b'{"command"', b': "hello"}\n{"comm', b'and": "status"}\n{"command": "hello"}\n{')
    with served() as server, connected(server.path) as (client, answers):
        for part in parts:
            client.sendall(part)
        client.shutdown(socket.SHUT_WR)
        assert [json.loads(line)["result"] for line in answers] == [None, STATUS, None]


def test_an_answer_of_any_length_arrives_whole():
    workers = [STATUS["workers"][0] | {"reason": "x" * 1000}] * 3000
    with served(controller=Launched(workers=workers)) as server:
        assert ask(server.path, "status").result["workers"] == workers


def test_every_answer_says_whose_it_is(tmp_path):
    with served(run_dir=tmp_path / "a" / ".." / "b") as server:
        job = ask(server.path, "hello").job
    assert job == jobs.Job(
        name="digits", run_dir=str(tmp_path / "b"), pid=os.getpid(), path=server.path
    )


def test_what_json_can_not_hold_is_made_plain():
    values = {"lr": math.nan, "gain": [math.inf, (1, 2)], "run_dir": Path("/x"), "last": {3: None}}
    controller = Launched()
    controller.values = values
    with served(controller=controller) as server:
        assert ask(server.path, "status").result == {
            "lr": None,
            "gain": [None, [1, 2]],
            "run_dir": "/x",
            "last": {"3": None},
        }


def test_a_silent_client_is_cut_off_and_keeps_nobody_waiting():
    with served(idle_limit_s=0.2) as server, connected(server.path) as (client, answers):
        client.sendall(b'{"command"')
        assert ask(server.path, "status").result == STATUS
        assert answers.read() == b""


def test_a_client_that_never_reads_is_cut_off():
    with served(idle_limit_s=0.2) as server, connected(server.path) as (client, _):
        with pytest.raises(ConnectionError):
            while True:
                client.sendall(b'{"command": "status"}\n' * 1000)
        assert ask(server.path, "status").result == STATUS


def test_clients_are_answered_side_by_side_on_one_thread():
    controller = Launched()
    together = threading.Barrier(20, timeout=LIMIT_S)

    def client(number):
        with connected(server.path) as (one, answers):
            together.wait()
            for _ in range(20):
                request = {"command": "scale", "n": 1 + number % 4, "worker": number}
                one.sendall(json.dumps(request).encode() + b"\n")
                assert (
                    json.loads(answers.readline())["result"] == f"going to {1 + number % 4} workers"
                )

    with served(controller=controller) as server, ThreadPoolExecutor(20) as pool:
        list(pool.map(client, range(20)))
    assert sorted(controller.calls) == sorted((1 + n % 4, n) for n in range(20) for _ in range(20))
    assert controller.threads == {"elastane control"}


def test_the_end_waits_for_no_client():
    with ExitStack() as later:
        with served() as server:
            client, answers = later.enter_context(connected(server.path))
            client.sendall(b'{"command": "hello"}\n')
            assert answers.readline()
            before = time.monotonic()
        assert time.monotonic() - before < control._END_LIMIT_S
        assert answers.read() == b""


def test_the_end_waits_for_no_controller_that_waits_for_it(monkeypatch):
    monkeypatch.setattr(control, "_END_LIMIT_S", 0.05)
    entered, ended = threading.Event(), threading.Event()

    class Waiting(Launched):
        def status(self):
            entered.set()
            assert ended.wait(LIMIT_S)
            return {}

    with ExitStack() as later:
        with served(controller=Waiting()) as server:
            client, answers = later.enter_context(connected(server.path))
            client.sendall(b'{"command": "status"}\n')
            assert entered.wait(LIMIT_S)
        assert not server.path.exists()
        ended.set()
        assert json.loads(answers.readline())["result"] == {}
        assert answers.read() == b""


def test_a_launcher_without_a_free_descriptor_answers_later():
    class Full(socket.socket):
        failures = 2

        def accept(self):
            self.failures -= 1
            if self.failures >= 0:
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    listener = Full(socket.AF_UNIX)
    path = socket_path("digits", folder=own_folder())
    listener.bind(str(path))
    listener.listen()
    server = LineServer(listener, answer=lambda line: line.upper() + b"\n", idle_limit_s=LIMIT_S)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    with connected(path) as (client, answers):
        client.sendall(b"hello\n")
        assert answers.readline() == b"HELLO\n"
    server.end()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert not is_live(path)


# --- errors


def test_an_error_of_the_launcher_comes_back_as_it_was():
    with served() as server:
        with pytest.raises(ArgumentError, match=r"^n=9: more than 4 workers\. Give at most 4\.$"):
            ask(server.path, "scale", n=9)
        with pytest.raises(StateError, match="no checkpoint"):
            ask(server.path, "stop")


def test_a_fault_of_the_launcher_is_told_on_both_sides(capfd):
    with served() as server:
        with pytest.raises(ElastaneError, match="could not answer: KeyError: 'a fault'"):
            ask(server.path, "kill")
        assert ask(server.path, "status").result == STATUS
    assert "Traceback" in capfd.readouterr().err


def test_a_gone_and_a_stopped_launcher_are_told_apart():
    path = leave_a_dead_socket()
    with pytest.raises(ConnectionError, match="job digits is gone"):
        ask(path, "status")
    path.unlink()
    with pytest.raises(ConnectionError, match="job digits is gone"):
        ask(path, "status")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        for _ in range(2):  # the first waits for an answer, the second finds no room to wait in
            with pytest.raises(TimeoutError, match=r"job digits did not answer within 0\.05 s"):
                ask(path, "status", timeout_s=0.05)
        assert is_live(path)


def test_a_launcher_that_ends_before_its_answer_is_gone():
    path = socket_path("digits", folder=own_folder())
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(path))
        listener.listen()
        asked = pool.submit(ask, path, "status")
        accepted, _ = listener.accept()
        accepted.recv(1000)
        accepted.close()
        with pytest.raises(ConnectionError, match="job digits is gone"):
            asked.result(LIMIT_S)


def test_commands_show_errors_by_exit_code():
    with served():
        assert refused("scale", "digits", 9, exit_code=2) == (
            "Error: n=9: more than 4 workers. Give at most 4.\n"
        )
        assert refused("stop", "digits", exit_code=1) == "Error: no checkpoint can be written\n"


# --- which job


def test_the_only_job_needs_no_name():
    controller = Launched()
    with served(controller=controller):
        assert succeed("scale", 2) == "going to 2 workers\n"
        assert succeed("scale", 3, "--remove", 7) == "going to 3 workers\n"
        assert json.loads(succeed("status", "--json")) == STATUS
    assert controller.calls == [(2, None), (3, 7)]


def test_without_a_name_there_must_be_exactly_one_job():
    assert "No job runs." in refused("status", exit_code=2)
    with served("a"), served("b"):
        assert "Running: a, b." in refused("status", exit_code=2)


def test_an_unknown_job_is_told_which_ones_run():
    assert "job='c': no job of this name runs here" in refused("stop", "c", exit_code=2)
    with served("a"), served("y" * 200):
        message = refused("scale", "c", 1, exit_code=2)
    running = message.rpartition("Running: ")[2].rstrip(".\n")
    assert sorted(running.split(", ")) == ["a", "y" * 200]


def test_a_job_may_be_named_by_its_run_folder(tmp_path, monkeypatch):
    run_dir = write_launcher(tmp_path / "other", "digits")
    monkeypatch.chdir(tmp_path)
    with served(run_dir=run_dir), served("other") as other:
        for given in (str(run_dir), "./other", f"{run_dir}/"):
            assert find_job(given).name == "digits"
        assert find_job("other").path == other.path


def test_the_folder_of_an_earlier_job_does_not_reach_the_one_that_took_its_name(tmp_path):
    earlier = write_launcher(tmp_path / "earlier", "digits")
    assert "No job runs." in refused("stop", earlier, exit_code=2)
    with served(run_dir=tmp_path / "later"):
        assert "Running: digits." in refused("stop", earlier, exit_code=2)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff", b'{"job": "dig'])
def test_a_damaged_record_of_a_launcher_is_named(tmp_path, text):
    (tmp_path / LAUNCHER_NAME).write_bytes(text)
    assert f"{LAUNCHER_NAME} is no launcher's record" in refused("status", tmp_path, exit_code=1)


@pytest.mark.parametrize("n", ["x", "0", "1.5", ""])
def test_a_number_of_workers_that_is_none_is_refused(n):
    assert f"N={n if n == '0' else repr(n)}: must be a whole number of at least 1" in refused(
        "scale", "digits", n, exit_code=2
    )


def test_scale_takes_one_job_and_one_number():
    assert "Missing argument" in invoke("scale").stderr
    assert "3 arguments where [JOB] N was expected" in invoke("scale", "a", "b", 3).stderr


# --- status


def test_status_shows_workers_step_and_last_change():
    with served():
        text = succeed("status", "digits")
    for part in (
        "digits, running",
        "runs/digits",
        "5, death: worker 2 [rank 1] was killed",
        "2 of 3 wanted, 1 to 4 allowed",
        "1,234",
        "1,180 of 2,500 base steps",
        "0.05",
        "1.52",
        "256",
        "4,322",
        "pause 85 ms",
        "54321",
        "warming",
        "node1",
    ):
        assert part in text, part


def test_status_shows_what_is_not_known_yet_as_a_dash():
    controller = Launched()
    controller.values = UNKNOWN
    with served(controller=controller):
        text = succeed("status")
        assert json.loads(succeed("status", "--json")) == UNKNOWN
    assert "None" not in text
    assert "last change  –" in text


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0 s"), (119, "119 s"), (130, "2 min"), (8000, "2 h"), (1e6, "12 d")]
)
def test_the_age_of_a_change_is_shown_in_one_unit(seconds, shown):
    assert age_text(seconds) == shown


def test_status_of_one_word_is_enough():
    controller = Launched()
    controller.values = {}
    with served(controller=controller):
        assert "–" in succeed("status")


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_watching_ends_with_the_job(state):
    with served(controller=Launched(state=state)):
        text = succeed("status", "--watch")
        assert f"digits, {state}" in text
        assert text.endswith(
            "has ended; its run folder is " + str(Path("runs/digits").resolve()) + "\n"
        )
        assert json.loads(succeed("status", "--watch", "--json"))["state"] == state


def test_watching_ends_when_the_launcher_goes():
    command = [sys.executable, "-m", "elastane", "status", "--watch"]
    with ExitStack() as later:
        with served():
            process = later.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            )
            later.callback(process.kill)
            while "node1" not in process.stdout.readline():
                pass
        rest, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert rest.endswith(f"digits has ended; its run folder is {Path('runs/digits').resolve()}\n")


def test_watching_redraws_on_a_terminal_and_ctrl_c_ends_it_quietly():
    pty = pytest.importorskip("pty")
    with served():
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "elastane", "status", "digits", "--watch"]
        with subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs) as process:
            try:
                os.close(theirs)
                shown = b""
                while b"node1" not in shown:
                    shown += os.read(ours, 65536)
                process.send_signal(signal.SIGINT)
                assert process.wait(LIMIT_S) == 0
            finally:
                process.kill()
                os.close(ours)
    assert b"Traceback" not in shown


# --- stop


def test_stop_waits_until_the_launcher_is_gone(tmp_path):
    with launcher(run_dir=tmp_path) as process:
        text = succeed("stop", "digits")
        assert process.wait(LIMIT_S) == 0
    first, second, third = text.splitlines()
    assert first == "workers write a checkpoint and leave"
    assert second.startswith("digits ended after ")
    assert third == f"its run folder is {tmp_path}"
    assert live_sockets() == []


def test_stop_says_when_the_job_does_not_end_and_now_ends_it():
    with launcher(stubborn=True) as process:
        result = invoke("stop", "--timeout", "0.1")
        assert result.exit_code == 1
        assert "digits still runs after 0.1 s, last seen stopping at step 7." in result.stderr
        assert "--now" in result.stderr
        assert process.poll() is None
        assert "digits ended after" in succeed("stop", "--now")
        assert process.wait(LIMIT_S) == 0


def test_elsewhere_than_on_linux_the_socket_tells_the_end(monkeypatch):
    monkeypatch.setattr(jobs.sys, "platform", "darwin")
    monkeypatch.setattr(jobs, "_POLL_S", 0.01)
    with served():
        job = find_job("digits")
        assert not wait_until_gone(job, timeout_s=0.03)
    assert wait_until_gone(job, timeout_s=0.0)


def test_a_process_that_is_gone_already_has_ended():
    with launcher() as process:
        job = find_job("digits")
        process.kill()
        process.wait(LIMIT_S)
    assert wait_until_gone(job, timeout_s=0.0)


# --- ps


def test_ps_lists_jobs_and_clears_dead_sockets_away(tmp_path):
    assert succeed("ps") == "no job runs\n"
    assert json.loads(succeed("ps", "--json")) == []
    dead = leave_a_dead_socket("dead")
    with served("a", run_dir=tmp_path / "a"), served("b", run_dir=tmp_path / "b"):
        rows = json.loads(succeed("ps", "--json"))
        text = succeed("ps")
    assert not dead.exists()
    assert rows == [
        {
            "job": name,
            "state": "running",
            "workers": 2,
            "step": 1234,
            "pid": os.getpid(),
            "run_dir": str(tmp_path / name),
        }
        for name in "ab"
    ]
    assert "run folder" in text
    assert "running" in text
    assert "dead" not in text


def test_ps_shows_a_stopped_launcher_and_waits_no_longer_than_it_must(monkeypatch):
    monkeypatch.setattr(commands, "_GLANCE_LIMIT_S", 1.0)
    with launcher() as process, served("other"):
        process.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        rows = {row["job"]: row["state"] for row in json.loads(succeed("ps", "--json"))}
    assert rows == {"digits": "no answer", "other": "running"}


# --- the commands themselves


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("scale", ["[JOB] N", "--remove WORKER_ID", "run folder"]),
        ("status", ["[JOB]", "--json", "--watch", "exactly one job"]),
        ("stop", ["[JOB]", "--now", "--timeout", "60"]),
        ("ps", ["--json"]),
    ],
)
def test_help_says_what_a_command_takes(command, parts):
    text = succeed(command, "--help")
    assert all(part in text for part in parts)
    assert command in succeed("--help")


@pytest.mark.parametrize("args", [["status"], ["ps"], ["scale", "2"], ["status", "--json"]])
def test_commands_start_without_torch(args):
    script = (
        "import sys\n"
        "from elastane.cli import main\n"
        f"main({args!r}, standalone_mode=False)\n"
        "assert not {'torch', 'numpy', 'matplotlib', 'asyncio'} & set(sys.modules)\n"
    )
    with served():
        command = [sys.executable, "-c", script]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)


def test_the_server_starts_without_torch():
    script = "import sys, elastane.launch.control; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT_S)
