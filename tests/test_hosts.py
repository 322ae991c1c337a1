"""The file of hosts: its form, its log, what is planned for a machine, and how it is reached."""

import json
import math
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from elastane.cli import main
from elastane.errors import ArgumentError
from elastane.launch.addresses import address_for, interface_to, is_loopback, outward_address
from elastane.launch.folder import LauncherRecord, lock_agent
from elastane.launch.hosts import HostsJob, HostsWatcher
from elastane.launch.hosts_file import Host, HostsDiff, diff_hosts, parse_hosts, shown
from elastane.launch.hosts_log import add_change, log_of, newest_changes, read_changes
from elastane.launch.hosts_plan import Place, PlanRules, Sight, next_step
from elastane.launch.lifeline import Lifeline
from elastane.launch.link import serve
from elastane.launch.machines import advertised, joinable, port_of
from elastane.launch.options import HostsOptions, RunOptions
from elastane.launch.ssh import Process, Reach, agent_command, is_local, prepare_command
from elastane.launch.watched_file import WatchedFile
from elastane.protocol import INBOX, Draining, heartbeat_key, parse_fact, released_key
from elastane.roster import Rules

LIMIT_S = 30.0

names = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,12}", fullmatch=True)
host_lists = st.dictionaries(names, st.integers(1, 999), min_size=1).map(
    lambda slots: tuple(Host(name=name, slots=n) for name, n in slots.items())
)


def text_of(hosts):
    return "".join(f"{one.name} slots={one.slots}\n" for one in hosts)


@given(host_lists)
def test_a_file_says_what_was_written_into_it(hosts):
    assert parse_hosts(text_of(hosts)) == hosts


@given(host_lists, st.data())
def test_a_file_that_is_cut_off_anywhere_is_refused_or_has_whole_lines(hosts, data):
    text = text_of(hosts)
    cut = text[: data.draw(st.integers(0, len(text)))]
    try:
        found = parse_hosts(cut)
    except ArgumentError:
        assert not cut.endswith("\n")
    else:
        assert found == hosts[: len(found)]


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused_with_the_rule(text):
    with suppress(ArgumentError):
        found = parse_hosts(text)
        assert found
        assert all(one.slots >= 1 and not one.name.startswith("-") for one in found)


def test_comments_and_empty_lines_say_nothing():
    assert parse_hosts("\n# a\n  node-1  # b\n\n", default_slots=3) == (
        Host(name="node-1", slots=3),
    )


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("node-1\nnode-2 slo\n", "line 2: must be HOST or HOST slots=N"),
        ("node-1 slots=0\n", "line 1: must be HOST or HOST slots=N"),
        ("node-1 slots=2 slots=3\n", "line 1: must be HOST or HOST slots=N"),
        ("-oProxyCommand=x\n", "line 1: must be HOST or HOST slots=N"),
        ("../x\n", "line 1: must be HOST or HOST slots=N"),
        ("node-1\nnode-", "line 2: has no end, so the file may be half written"),
        ("a\nb\na slots=2\n", "line 3: this host has a line already"),
        ("# nobody\n", "there is no host in it"),
        ("", "there is no host in it"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused_with_line_and_rule(text, rule):
    with pytest.raises(ArgumentError, match=r"^hosts=") as refused:
        parse_hosts(text)
    assert rule in str(refused.value)


@given(host_lists, host_lists)
def test_a_difference_leads_from_one_list_to_the_other(before, after):
    found = diff_hosts(before, after)

    gone = {one.name for one in (*found.removed, *found.changed)}
    kept = [one for one in before if one.name not in gone]
    assert {*kept, *found.added, *found.changed} == set(after)
    assert bool(shown(found)) == (set(before) != set(after))
    assert diff_hosts(after, after) == HostsDiff()


def test_the_log_counts_on_over_launchers_and_torn_lines(tmp_path):
    log = log_of(tmp_path / "hosts.txt")
    known = {"host": "node-1", "job": "one"}

    add_change(log, change="ADDED", cause="joined", slots=2, **known)
    with log.open("a") as file:
        file.write('{"number": 2, "ti')
    add_change(log, change="FAILED", cause="no luck", **known)
    add_change(log, change="ADDED", cause="joined", host="node-2", job="another")

    changes = read_changes(log)
    assert [one.number for one in changes] == [1, 2, 3]
    assert list(newest_changes(changes, job="one")) == ["node-1"]
    assert newest_changes(changes, job="one")["node-1"].cause == "no luck"
    assert set(json.loads(log.read_text().splitlines()[0])) >= {
        *("number", "time", "change", "host", "cause")
    }


RULES = PlanRules(silence_limit_s=3.0, start_patience_s=60.0)
HOST = Host(name="node-1", slots=2)
GONE = Sight(runs=False, code=255, words="Connection refused")
RUNS = Sight(runs=True)


def take(place, host=HOST, sight=None, *, time, rules=RULES):
    return next_step(place, host, sight or Sight(), rules=rules, time=time)


def there(**fields):
    told = {"told": ("ADDED", "joined"), "slots": 2, "joined": True, **fields}
    return Place(name="node-1", stage="there", **told)


def test_a_machine_is_prepared_then_started_then_added():
    rules = replace(RULES, prepares=True)
    prepare = take(Place(name="node-1"), time=0.0, rules=rules)
    waits = take(prepare.place, sight=RUNS, time=1.0, rules=rules)
    start = take(prepare.place, sight=Sight(code=0), time=2.0, rules=rules)
    silent = take(start.place, sight=RUNS, time=3.0, rules=rules)
    joined = take(start.place, sight=replace(RUNS, heard=9.0), time=9.0, rules=rules)

    assert (prepare.action, waits, start.action, silent) == ("prepare", None, "start", None)
    assert (joined.change, joined.note, joined.place.slots) == ("ADDED", "joined, slots=2", 2)


def test_a_machine_that_can_not_be_prepared_fails_with_the_last_words_and_is_tried_again():
    rules = replace(RULES, prepares=True)
    place = Place(name="node-1", stage="preparing")
    failed = take(place, sight=Sight(code=7, words="disk full"), time=1.0, rules=rules)
    waits = take(failed.place, time=1.4, rules=rules)
    again = take(failed.place, time=1.6, rules=rules)

    assert (failed.change, failed.note) == ("FAILED", "--prepare ended with code 7: disk full")
    assert (failed.action, waits, again.action) == ("kill", None, "prepare")


def test_the_same_failure_is_told_once_and_tried_more_and_more_rarely():
    step = take(Place(name="node-1", stage="starting"), sight=GONE, time=0.0)
    assert (step.change, step.note) == (
        "FAILED",
        "the agent ended with code 255: Connection refused",
    )
    waits = []
    for _ in range(9):
        waits.append(step.place.due - step.place.since)
        begun = take(step.place, time=step.place.due)
        step = take(begun.place, sight=GONE, time=begun.place.since)
        assert step.change is None
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == 30.0


def test_the_death_of_ssh_is_no_death_while_the_agent_is_heard():
    loses = take(there(), sight=replace(GONE, heard=99.0), time=100.0)
    assert (loses.change, loses.action, loses.place.stage) == (None, "kill", "there")

    assert take(loses.place, sight=Sight(heard=199.0), time=200.0) is None
    silent = take(loses.place, sight=Sight(heard=199.0), time=202.5)
    assert (silent.change, silent.place.stage) == ("FAILED", "waiting")
    assert silent.note.startswith("no heartbeat for 3 s; what its agent was started through ended")


def test_a_machine_that_was_lost_with_the_launcher_is_a_failure_that_is_mended():
    known = Place(name="node-1", slots=2, due=3.0, told=("ADDED", "joined"))
    waits = take(known, time=2.0)
    heard = take(known, sight=Sight(heard=2.5), time=2.5)
    failed = take(known, time=3.0)
    started = take(failed.place, time=4.0)

    assert waits is None
    assert (heard.change, heard.place.stage) == (None, "there")
    assert (failed.change, started.action) == ("FAILED", "start")


def test_a_machine_that_is_heard_again_is_added_and_not_started():
    failed = take(there(), sight=Sight(heard=0.0), time=50.0)
    back = take(failed.place, sight=Sight(heard=51.0), time=51.0)

    assert (failed.change, failed.action) == ("FAILED", "kill")
    assert (back.change, back.action, back.note) == ("ADDED", "", "it is heard again")


def test_a_removed_line_is_a_planned_leave():
    leaving = take(there(), None, replace(RUNS, heard=10.0), time=10.0)
    told_again = take(leaving.place, None, replace(RUNS, heard=12.0), time=12.0)
    gone = take(told_again.place, None, Sight(heard=12.0, code=0), time=12.5)

    assert (leaving.action, leaving.change, told_again.action) == ("drain", None, "drain")
    assert (gone.action, gone.change, gone.place.stage) == ("release", "REMOVED", "gone")
    assert gone.note == "its line was removed"


def test_a_leaving_machine_that_falls_silent_is_gone():
    leaving = take(there(), None, Sight(heard=10.0), time=10.0).place

    assert take(leaving, None, Sight(heard=10.0), time=11.0) is None
    assert take(leaving, None, Sight(heard=10.0), time=13.5).change == "REMOVED"


def test_a_machine_whose_agent_is_only_starting_is_waited_for_when_its_line_is_removed():
    starting = Place(name="node-1", stage="starting", slots=2)
    leaving = take(starting, None, RUNS, time=1.0).place

    assert take(leaving, None, RUNS, time=20.0).action == "drain"
    assert take(leaving, None, RUNS, time=62.0).change == "REMOVED"


def test_other_slots_are_a_leave_and_a_join():
    wider = replace(HOST, slots=4)
    leaving = take(there(), wider, replace(RUNS, heard=5.0), time=5.0)
    gone = take(leaving.place, wider, Sight(heard=5.5, code=0), time=6.0)
    again = take(gone.place, wider, time=6.0)

    assert (leaving.action, gone.change, gone.place.stage) == ("drain", "REMOVED", "waiting")
    assert gone.note == "its line says slots=4, was 2: it leaves and comes back"
    assert (again.action, again.place.slots) == ("start", 4)


def test_a_line_that_goes_before_its_machine_came_is_gone_at_once():
    gone = take(Place(name="node-1", since=0.0, due=9.0), None, time=1.0)

    assert (gone.change, gone.place.stage) == ("REMOVED", "gone")


sights = st.builds(
    Sight,
    heard=st.sampled_from([-math.inf, 0.0, 5.0, 10.0]),
    runs=st.booleans(),
    code=st.sampled_from([None, 0, 2, 255]),
    words=st.just("words"),
)
events = st.tuples(sights, st.sampled_from([None, 1, 2]), st.floats(0.1, 200.0))


@given(st.lists(events, max_size=30), st.booleans())
def test_whatever_happens_changes_alternate_and_a_gone_machine_had_no_line(happened, prepares):
    place, time, changes = Place(name="node-1"), 0.0, []
    rules = replace(RULES, prepares=prepares)
    for sight, slots, later in happened:
        time += later
        host = None if slots is None else Host(name="node-1", slots=slots)
        seen = replace(sight, heard=time - sight.heard)
        step = next_step(place, host, seen, rules=rules, time=time)
        if step is None:
            continue
        place = step.place
        if step.change is not None:
            changes.append((step.change, step.note))
            assert step.note
        if place.stage == "gone":
            assert host is None
            assert step.change == "REMOVED"
            place = Place(name="node-1", since=time, due=time)
    told = [change for change, _ in changes]
    assert ("ADDED", "ADDED") not in pairwise(told)


REACH = Reach(
    store="10.0.0.1:29400",
    script=["train it.py", "--lr", "0.1"],
    folder=Path("/my runs"),
    python="/venv/bin/python",
    own_python=sys.executable,
    ssh=["ssh", "-p", "22"],
    prepare="mkdir -p '/tmp/{host}' && echo ok",
)


def test_an_agent_is_started_in_the_same_folder_with_the_same_arguments():
    ssh, *options, host, line = agent_command(Host(name="me@node-1", slots=4), reach=REACH)

    assert (ssh, options, host) == ("ssh", ["-p", "22"], "me@node-1")
    assert line == (
        "cd '/my runs' && exec /venv/bin/python -m elastane run --join 10.0.0.1:29400 "
        "--agent me@node-1 --slots 4 --lifeline 'train it.py' --lr 0.1"
    )


def test_this_machine_needs_no_ssh():
    command = agent_command(Host(name="localhost", slots=4), reach=REACH)

    assert command[:4] == [sys.executable, "-m", "elastane", "run"]
    assert is_local(socket.gethostname())
    assert prepare_command(Host(name="localhost"), reach=REACH) == [
        *("sh", "-c", "mkdir -p '/tmp/localhost' && echo ok")
    ]


def test_preparing_happens_on_the_machine_itself():
    *_, host, line = prepare_command(Host(name="node-1"), reach=REACH)

    assert host == "node-1"
    assert line == "cd '/my runs' && { mkdir -p '/tmp/node-1' && echo ok\n}"


def test_a_process_tells_its_code_and_last_words_and_is_ended_with_what_it_started(tmp_path):
    log = tmp_path / "logs" / "one.log"
    first = Process(["sh", "-c", "echo before; exit 3"], folder=tmp_path, log=log)
    assert first.wait(LIMIT_S)
    second = Process(["sh", "-c", "cat; echo after >&2"], folder=tmp_path, log=log)
    assert second.code is None
    second.let_go()
    assert second.wait(LIMIT_S)
    third = Process(["sh", "-c", "sleep 1000 | cat"], folder=tmp_path, log=log)
    for process in (first, second, third):
        process.kill()

    assert (first.code, second.code, second.words) == (3, 0, "after")
    assert third.code == -9


def test_a_file_is_read_once_it_stands_still(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text("one\n")
    watched = WatchedFile(path)

    assert [watched.has_changed() for _ in range(4)] == [False, True, False, False]
    path.write_text("one\ntwo\n")
    assert [watched.has_changed() for _ in range(4)] == [False, False, True, False]
    other = tmp_path / "other"
    other.write_text("two\none\n")
    other.replace(path)
    assert [watched.has_changed() for _ in range(4)] == [False, False, True, False]
    path.unlink()
    assert [watched.has_changed() for _ in range(4)] == [False, False, True, False]


def test_the_loopback_has_no_interface_that_others_reach():
    assert interface_to("127.0.0.1") is None
    assert interface_to("no.such.host.invalid") is None
    assert is_loopback(address_for(["127.0.0.3"]))
    assert [is_loopback(one) for one in ("::1", "localhost", "10.0.0.1")] == [True, True, False]


def test_the_way_out_has_an_interface_if_there_is_one():
    address = outward_address()
    if address == socket.gethostname():
        pytest.skip("this machine has no network")
    assert interface_to(address) in [name for _, name in socket.if_nameindex()]


def options_of(*hosts, **given):
    listed = [Host(name=name) for name in hosts]
    own = HostsOptions(path=Path("hosts"), hosts=listed, default_slots=1, ssh=["ssh"])
    known = {"command": ["x"], "script": ["x"], "name": "x", "rules": Rules()}
    return RunOptions(**known, hosts=own if hosts else None, **given)


def test_the_store_is_advertised_where_all_machines_reach_it():
    assert advertised(options_of(), port=9) == "127.0.0.1:9"
    assert advertised(options_of("localhost"), port=9) == "127.0.0.1:9"
    assert advertised(options_of("127.0.0.3", "localhost"), port=9) == "127.0.0.1:9"
    assert advertised(options_of("localhost", advertise="head"), port=9) == "head:9"
    assert advertised(options_of(advertise="::2"), port=9) == "[::2]:9"
    assert joinable("head:9") == "head:9"
    assert joinable("127.0.0.1:9") == f"{outward_address()}:9"


def test_the_port_that_workers_look_for_is_kept_and_another_refused():
    known = LauncherRecord(job="x", pid=1, store="127.0.0.1:29400")

    assert [port_of(known, asked=asked) for asked in (0, 29400)] == [29400, 29400]
    assert port_of(replace(known, store=""), asked=29401) == 29401
    with pytest.raises(ArgumentError, match="the job of this folder is at port 29400"):
        port_of(known, asked=29401)


def test_an_agent_of_a_given_id_is_there_once(tmp_path):
    with lock_agent(tmp_path, host="here", agent="node-1") as agent:
        assert agent == "node-1"
        with (
            pytest.raises(ArgumentError, match="agent='node-1': this agent of the job lives"),
            lock_agent(tmp_path, host="here", agent="node-1"),
        ):
            pass


@pytest.fixture
def store():
    return serve(0)


def test_an_agent_ends_when_its_line_is_cut_and_the_store_says_so(store, pipe):
    ended = threading.Event()
    reading, writing = pipe
    address = f"127.0.0.1:{store.port}"
    with Lifeline(agent="node-1", address=address, on_end=ended.set, file=reading):
        store.set(released_key("node-1"), "")
        assert not ended.wait(0.05)  # the line is whole
        store.delete_key(released_key("node-1"))
        writing.close()
        assert not ended.wait(0.05)  # the store says nothing
        store.set(released_key("node-1"), "")
        assert ended.wait(LIMIT_S)


def test_a_lifeline_is_let_go_of_while_it_waits(store, pipe):
    reading, writing = pipe
    address = f"127.0.0.1:{store.port}"
    before = threading.active_count()
    for cut in (False, True):
        if cut:
            writing.close()
        with Lifeline(agent="node-1", address=address, on_end=pytest.fail, file=reading):
            pass
    assert threading.active_count() == before


@pytest.fixture
def pipe():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours.fileno(), theirs


class Beating:
    """A watcher's job whose agents are commands that do nothing, and beat when told to."""

    def __init__(self, folder, store):
        self.folder, self.store = folder, store
        self.file = folder / "hosts.txt"
        self.said = []

    def write(self, text):
        part = self.file.with_suffix(".part")
        part.write_text(text)
        part.replace(self.file)

    def watcher(self, **rules):
        reach = replace(REACH, folder=self.folder, ssh=["sh", "-c", "exec cat", "sh"], prepare=None)
        job = HostsJob(
            job="test",
            run_dir=self.folder / "run",
            address=f"127.0.0.1:{self.store.port}",
            default_slots=1,
            reach=reach,
            rules=PlanRules(**rules),
        )
        hosts = parse_hosts(self.file.read_text())
        known = {"is_over": lambda: False, "say": self.said.append, "follow": lambda _: None}
        return HostsWatcher(self.file, job=job, hosts=hosts, **known)

    def beat(self, *names):
        for name in names:
            self.store.add(heartbeat_key(name), 1)

    def until(self, fact, *, beating=()):
        pause = threading.Event()
        for _ in range(int(LIMIT_S / 0.05)):
            if fact():
                return
            self.beat(*beating)
            pause.wait(0.05)
        pytest.fail(f"waited in vain: {self.said}")

    def changes(self):
        return [(one.change, one.host) for one in read_changes(log_of(self.file))]

    def drained(self):
        """Return the agents that were told to leave."""
        found = set()
        while self.store.queue_len(INBOX):
            fact = parse_fact(self.store.queue_pop(INBOX))
            assert isinstance(fact, Draining)
            found.add(fact.agent)
        return found


@pytest.fixture
def beating(tmp_path, store):
    return Beating(tmp_path, store)


def test_lines_that_come_and_go_start_agents_and_have_them_leave(beating):
    beating.write("node-1\n")
    with beating.watcher(silence_limit_s=1.0):
        beating.until(lambda: beating.changes() == [("ADDED", "node-1")], beating=["node-1"])
        beating.write("node-1\nnode-2 slots=2\n")
        both = ["node-1", "node-2"]
        beating.until(lambda: ("ADDED", "node-2") in beating.changes(), beating=both)
        beating.write("node-2 slots=2\n")
        drained = set()
        beating.until(lambda: drained.update(beating.drained()) or drained, beating=both)
        beating.until(lambda: beating.changes()[-1] == ("REMOVED", "node-1"), beating=both[1:])

        assert drained == {"node-1"}
        assert beating.store.check([released_key("node-1")])
        assert not beating.store.check([released_key("node-2")])
        assert any(said.endswith("node-2 (2 slots) is new") for said in beating.said)
    assert beating.store.check([released_key("node-2")])


@pytest.mark.parametrize("text", ["node-1\nno", "", "node-1 slots=many\n", None])
def test_a_file_that_is_half_written_malformed_or_gone_changes_nothing_and_it_is_said(
    beating, text
):
    beating.write("node-1\n")
    with beating.watcher(silence_limit_s=1.0):
        beating.until(lambda: beating.changes(), beating=["node-1"])
        if text is None:
            beating.file.unlink()
        else:
            beating.write(text)
        beating.until(lambda: "changes nothing" in beating.said[-1], beating=["node-1"])
        said = len(beating.said)
        beating.write("node-1\n")
        beating.write("node-1\nnode-2\n")
        beating.until(lambda: len(beating.said) > said, beating=["node-1"])

        assert beating.changes()[0] == ("ADDED", "node-1")
        assert beating.drained() == set()


def test_a_watcher_that_comes_back_meets_what_the_one_before_it_left(beating):
    log, both = log_of(beating.file), ["node-1", "node-2"]
    for name, slots in (("node-1", 2), ("node-2", 1)):
        add_change(log, change="ADDED", host=name, cause="joined", job="test", slots=slots)
    beating.write("node-1 slots=2\n")
    with beating.watcher(silence_limit_s=1.0):
        beating.until(beating.drained, beating=both)
        beating.until(lambda: len(beating.changes()) == 3, beating=["node-1"])
        assert beating.changes()[-1] == ("REMOVED", "node-2")

    ended = read_changes(log)
    assert [one.number for one in ended] == [1, 2, 3, 4]
    assert (ended[-1].host, ended[-1].cause) == ("node-1", "the job is over")


def test_a_command_that_does_not_exist_is_a_failure_like_any_other(beating):
    beating.write("node-1\n")
    watcher = beating.watcher()
    watcher._job = replace(watcher._job, reach=replace(REACH, ssh=["no-such-ssh"], prepare=None))
    with watcher:
        beating.until(beating.changes)

    change = read_changes(log_of(beating.file))[0]
    assert (change.change, change.host) == ("FAILED", "node-1")
    assert "No such file" in change.cause


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "hosts.txt", "train.py"], "hosts='node-': line 1: has no end"),
        (["--hosts", "good.txt", "--slots", "0", "train.py"], "a machine of --hosts holds workers"),
        (["--hosts", "good.txt", "--join", "a:1", "train.py"], "hosts='good.txt': has no effect"),
        (["--join", "a:1", "--slots", "0", "train.py"], "slots=0: has no effect on a machine"),
        (["--prepare", "true", "train.py"], "prepare='true': has no effect without --hosts"),
        (["--hosts", "none.txt", "train.py"], "'none.txt' does not exist"),
    ],
)
def test_arguments_about_hosts_are_refused_with_the_rule(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("hosts.txt", "node-"), ("good.txt", "node-1\n"), ("train.py", "")):
        (tmp_path / name).write_text(text)

    refused = CliRunner().invoke(main, ["run", *arguments])

    assert refused.exit_code == 2
    assert message in refused.output
