"""The chaos benchmark: its audit finds what hand-made records hide, and real jobs come through."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.chaos.audit import audit, orphans
from benchmarks.chaos.events import KINDS, Deck, is_possible
from benchmarks.chaos.picture import draw
from benchmarks.chaos.records import Step, record_path
from benchmarks.chaos.watch import View

ROOT = Path(__file__).parents[1]
NUM_SAMPLES = 8
LIMIT_S = 240.0

processes = pytest.mark.processes


def enter(generation, *, step, position, state="same", worker=1):
    return {
        "kind": "enter",
        "generation": generation,
        "worker": worker,
        "rank": 0,
        "world_size": 2,
        "start_step": step,
        "start_position": position,
        "state_hash": state,
        "time": 0.0,
    }


def part(generation, start, *indices):
    return {"kind": "part", "generation": generation, "start": start, "indices": indices}


def step(generation, number, start, stop, *, time=None):
    return {
        "kind": "step",
        "generation": generation,
        "step": number,
        "start": start,
        "stop": stop,
        "world_size": 2,
        "time": float(number) if time is None else time,
    }


class Run:
    """Records of two workers that took 4 samples a step together, twice: a whole epoch."""

    def __init__(self, folder):
        self.folder = folder
        self.lines = {
            1: [
                enter(1, step=0, position=0),
                *(part(1, 0, 5, 0), step(1, 1, 0, 4)),
                *(part(1, 4, 7, 2), step(1, 2, 4, 8)),
            ],
            2: [
                enter(1, step=0, position=0, worker=2),
                *(part(1, 0, 3, 1), step(1, 1, 0, 4)),
                *(part(1, 4, 6, 4), step(1, 2, 4, 8)),
            ],
        }

    def add(self, worker, *lines):
        self.lines.setdefault(worker, []).extend(lines)
        return self

    def audit(self, *, torn=b"", **given):
        for worker, lines in self.lines.items():
            path = record_path(self.folder, worker)
            path.parent.mkdir(exist_ok=True)
            text = "".join(json.dumps(line) + "\n" for line in lines)
            path.write_bytes(text.encode() + torn)
        return audit(self.folder, num_samples=NUM_SAMPLES, **given)


def broken_promises(found):
    names = ("samples_lost", "samples_repeated", "false_commits", "problems")
    return {name: found[name] for name in names if found[name]}


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_a_run_without_faults_is_clean(run):
    found = run.audit()

    assert broken_promises(found) == {}
    assert found["replicas_equal"]
    assert (found["committed_steps"], found["generations"], found["void_steps"]) == (2, 1, 0)


def test_a_lost_sample_is_found(run):
    run.lines[2][-2]["indices"] = (6,)

    assert broken_promises(run.audit()) == {"samples_lost": 1}


def test_a_repeated_sample_is_found_and_misses_where_it_took_anothers_place(run):
    run.lines[2][-2]["indices"] = (6, 5)

    assert broken_promises(run.audit()) == {"samples_lost": 1, "samples_repeated": 1}


def test_a_repeated_sample_of_the_unfinished_epoch_is_found(run):
    run.add(1, part(1, 8, 0, 1), step(1, 3, 8, 12)).add(2, part(1, 8, 2, 1))

    assert broken_promises(run.audit()) == {"samples_lost": 1, "samples_repeated": 1}


def test_an_index_comes_once_in_each_epoch(run):
    run.add(1, part(1, 8, 0, 1), step(1, 3, 8, 12)).add(2, part(1, 8, 2, 3))

    assert broken_promises(run.audit()) == {}


def test_a_step_without_any_record_leaves_a_gap(run):
    run.add(1, part(1, 12, 0, 1), step(1, 4, 12, 16)).add(2, part(1, 12, 2, 3))

    found = run.audit()

    assert found["samples_lost"] == 4
    assert found["problems"] == [
        "step 4 of generation 1 starts at 12, but step 2 of generation 1 ended at 8"
    ]


def with_a_void_step(run):
    """Worker 2 committed step 3 and died; worker 1 made it again in generation 2, with worker 3."""
    run.add(1, part(1, 8, 0, 1), enter(2, step=2, position=8))
    run.add(2, part(1, 8, 2, 3), step(1, 3, 8, 12))
    run.add(3, enter(2, step=2, position=8, worker=3), part(2, 8, 2, 3))
    return run.add(1, part(2, 8, 0, 1), step(2, 3, 8, 12))


def test_a_step_that_nobody_copied_is_void_and_counts_when_it_is_made_again(run):
    found = with_a_void_step(run).audit()

    assert broken_promises(found) == {}
    assert (found["void_steps"], found["committed_steps"]) == (1, 3)


def test_a_step_that_is_made_again_though_it_was_copied_is_repeated(run):
    with_a_void_step(run)
    for worker in (1, 3):
        entry = next(line for line in run.lines[worker] if line["generation"] == 2)
        entry |= {"start_step": 3, "start_position": 12}

    assert run.audit()["samples_repeated"] == 4


@pytest.mark.parametrize(
    ("name", "event"), [("run/events.jsonl", "step"), ("checkpoints.jsonl", "checkpoint")]
)
def test_a_void_step_that_was_shown_as_final_is_a_false_commit(run, name, event):
    shown = run.folder / name
    shown.parent.mkdir(exist_ok=True)
    lines = [{"event": event, "generation": 1, "step": step} for step in (2, 3)]
    shown.write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert broken_promises(with_a_void_step(run).audit()) == {"false_commits": 1}


def test_what_a_worker_gave_before_it_died_counts_without_its_own_word(run):
    del run.lines[2][-1]

    assert broken_promises(run.audit()) == {}


def test_a_part_that_was_given_in_vain_does_not_count(run):
    run.add(2, part(1, 8, 3, 1))

    assert broken_promises(run.audit()) == {}


def test_a_torn_last_line_is_passed_over(run):
    assert broken_promises(run.audit(torn=b'{"kind": "step", "genera')) == {}


@pytest.mark.parametrize("other", [{"state": "other"}, {"step": 1}, {"position": 4}])
def test_replicas_that_begin_differently_are_found(run, other):
    run.lines[2][0] = enter(1, **{"step": 0, "position": 0} | other, worker=2)

    found = run.audit()

    assert not found["replicas_equal"]
    assert found["problems"] == ["generation 1: workers [[1], [2]] began in different states"]


def test_two_stories_of_one_step_are_found(run):
    run.lines[2][-1] = step(1, 2, 4, 7)

    found = run.audit()

    assert not found["replicas_equal"]
    assert "step 2 of generation 1 took positions 4 to 8 on one worker" in found["problems"][0]


def test_two_results_of_one_evaluation_are_found(run):
    evaluation = {"kind": "evaluation", "generation": 1, "step": 2, "num_samples": 4}
    run.add(1, {**evaluation, "sums": {"correct": 3.0}})
    run.add(2, {**evaluation, "sums": {"correct": 2.0}})

    found = run.audit()

    assert not found["replicas_equal"]
    assert "the evaluation after step 2 of generation 1 is" in found["problems"][0]


def test_the_longest_stall_is_named_after_the_event_before_it(run):
    run.add(1, part(1, 8, 0, 1), step(1, 3, 8, 12, time=6.5)).add(2, part(1, 8, 2, 3))
    events = [{"number": n, "kind": "kill", "time": float(time)} for n, time in ((1, 1), (2, 3))]

    found = run.audit(events=events)

    assert (found["max_stall_s"], found["max_stall_after"]) == (4.5, "2 kill")


@pytest.mark.parametrize(("in_change", "stall_s"), [(True, 1.5), (False, 4.5)])
def test_only_a_change_waits_for_a_launcher_that_was_killed(run, in_change, stall_s):
    run.add(1, part(1, 8, 0, 1), step(1, 3, 8, 12, time=6.5)).add(2, part(1, 8, 2, 3))
    killed = {"number": 1, "kind": "kill_launcher", "time": 1.5, "in_change": in_change, "back": 5}

    assert run.audit(events=[killed])["max_stall_s"] == stall_s


def test_a_step_is_dated_by_the_first_worker_that_knows_of_it(run):
    run.lines[2][-1]["time"] = 99.0

    assert run.audit()["max_stall_s"] == 1.0


def test_the_audit_shares_no_code_with_elastane():
    check = (
        "import sys, benchmarks.chaos.audit;"
        "print({'elastane', 'torch'} & {name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", check]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    assert shown.stdout.strip() == "set()"


@processes
def test_a_process_that_is_left_behind_is_found():
    job = f"left-{os.getpid()}"
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        env=os.environ | {"ELASTANE_JOB": job},
    )
    try:
        found = orphans(job, patience_s=0.0)
    finally:
        child.kill()
        child.communicate()

    assert found == [child.pid]
    assert orphans(job) == []


def view_of(healthy, *, starting=1, target=4):
    members = tuple(range(1, healthy + 1))
    made = {
        "start": 0,
        "stop": 4,
        "world_size": healthy,
        "time": 0.0,
        "generation": 3,
        "step": 9,
    }
    return View(
        generation=3,
        members=members,
        last_steps={worker: Step(**made) for worker in members},
        pids={worker: 100 + worker for worker in range(1, healthy + starting + 1)},
        target=target,
        max_workers=4,
        checkpoints=True,
    )


@pytest.mark.parametrize("healthy", [1, 2, 3, 4])
def test_the_last_healthy_member_is_never_hurt(healthy):
    view = view_of(healthy)
    deck = Deck(draw=random.Random(0))
    hurting = [kind for kind in KINDS if kind.startswith(("kill", "pause", "freeze"))]

    events = [event for _ in range(200) if (event := deck.next_event(view)) is not None]

    hurt = {event: set(event.workers) & set(view.members) for event in events}
    assert events
    assert all(len(hurt[event]) < healthy for event in events if event.kind in hurting)
    assert all(event.target >= 1 or event.kind in hurting for event in events)


def test_a_member_that_has_not_made_a_step_in_its_generation_is_not_healthy():
    view = view_of(2)

    assert view.healthy == (1, 2)
    assert view.is_settled(at_step=9)
    for stopped in ({"stopped": frozenset({1})}, {"generation": 4}, {"pids": {2: 102}}):
        other = {
            name: getattr(view, name) for name in ("generation", "members", "last_steps", "pids")
        }
        changed = View(**other | stopped, target=4, max_workers=4)
        assert not changed.is_settled(at_step=9)
        assert not is_possible("kill", changed)


def test_every_kind_of_event_gets_its_turn_and_a_seed_says_which():
    def deal(seed):
        deck = Deck(draw=random.Random(seed))
        return [deck.next_event(view_of(4, target=3)) for _ in range(len(KINDS))]

    assert deal(5) == deal(5) != deal(6)
    assert len({event.kind for event in deal(5)}) >= len(KINDS) - 2


def test_a_picture_of_a_long_run_can_be_drawn(tmp_path):
    draw_from = random.Random(0)
    with (tmp_path / "script.jsonl").open("w") as script:
        for number in range(2000):
            event = {"number": number, "kind": draw_from.choice(KINDS), "time": 3.0 * number}
            script.write(json.dumps(event) + "\n")
    result = {
        "sizes": [(1.5 * n, draw_from.randint(1, 4)) for n in range(4000)],
        "stalls": [(3.0 * n, draw_from.uniform(0.1, 2.2)) for n in range(500)],
        "ended": 6000.0,
        "stall_limit_s": 2.5,
        "events": 2000,
        "wall_s": 6010.0,
        **{"committed_steps": 250_000, "generations": 3200, "max_stall_s": 2.2},
        **{"samples_lost": 0, "samples_repeated": 0, "replicas_equal": True},
        **{"orphans": 0, "false_commits": 0},
    }

    draw(tmp_path, result, path=tmp_path / "chaos.png")

    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")


def start_chaos(tmp_path, *options):
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.chaos", "--out", str(tmp_path / "out"), *options],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@processes
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_a_job_keeps_its_promises_through_twenty_events(tmp_path, seed):
    quick = ("--every", "0.3", "--gathered", "0.1")
    chaos = start_chaos(tmp_path, "--events", "20", "--seed", seed, *quick)
    try:
        shown, told = chaos.communicate(timeout=LIMIT_S)
    finally:
        end(chaos)

    assert chaos.returncode == 0, f"{shown}\n{told}\n{launcher_log(tmp_path)}"
    result = json.loads(shown)
    assert result["events"] == sum(result["by_kind"].values()) == 20
    assert result["committed_steps"] > 60


@processes
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_run_that_is_interrupted(tmp_path, number):
    chaos = start_chaos(tmp_path, "--events", "1000", "--workers", "2")
    job = f"chaos-{chaos.pid}-0"
    deadline = time.monotonic() + LIMIT_S / 2
    try:
        while not list((tmp_path / "out").glob("records/worker-*.jsonl")):
            assert time.monotonic() < deadline, launcher_log(tmp_path)
            time.sleep(0.05)
        running = orphans(job, patience_s=0.0)
        chaos.send_signal(number)
        chaos.communicate(timeout=LIMIT_S / 4)
    finally:
        end(chaos)

    assert len(running) >= 2
    assert chaos.returncode != 0
    assert orphans(job) == []


def end(chaos):
    """End the benchmark as one would by hand: it ends its job itself."""
    if chaos.poll() is None:
        chaos.send_signal(signal.SIGINT)
        chaos.communicate(timeout=30)


def launcher_log(tmp_path):
    log = tmp_path / "out" / "launcher.log"
    return log.read_text()[-5000:] if log.exists() else "no launcher yet"
