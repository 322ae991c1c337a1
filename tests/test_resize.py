"""The measure of pauses on records made by hand, and the benchmarks themselves, shortened."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import steady
from benchmarks.resize.measure import Change, Event, Line, Membership, joins, measure, summarize
from benchmarks.resize.report import goals_of, summary

ROOT = Path(__file__).parent.parent


def step(time, *, worker=1, generation=1, pid=100, number=0, cpu=0.0):
    return Line(
        kind="step",
        worker=worker,
        pid=pid,
        time=time,
        generation=generation,
        step=number,
        cpu=cpu,
    )


def steps(*times, **fields):
    return [step(time, **fields) for time in times]


def every(seconds, *, start, count, **fields):
    return [step(start + i * seconds, **fields) for i in range(count)]


def event(**fields):
    defaults = {"kind": "kill", "begin": 10.05, "generation": 2, "survivors": (1,)}
    return Event(**(defaults | fields))


def before(**fields):
    """Steps of 0.1 s, the last of them at 10.0."""
    return every(0.1, start=8.0, count=21, **fields)


def after(start, seconds=0.1, **fields):
    return every(seconds, start=start, count=11, generation=2, **fields)


def test_a_pause_is_the_gap_around_the_change_without_the_usual_step():
    change = measure(event(), {1: [*before(), *after(10.5)]})

    assert change.pause_ms == pytest.approx(400)
    assert change.median_step_ms == pytest.approx(100)
    assert change.undisturbed_ms == pytest.approx(0, abs=1e-6)
    assert change.workers == 1


def test_the_survivor_that_waited_longest_counts():
    records = {
        1: [*before(), *after(10.3)],
        2: [*before(worker=2), *after(10.7, worker=2)],
    }

    assert measure(event(survivors=(1, 2)), records).pause_ms == pytest.approx(600)


def test_a_slow_second_step_in_the_new_group_belongs_to_the_change():
    slow = steps(10.2, 11.0, 11.1, 11.2, generation=2)

    assert measure(event(), {1: [*before(), *slow]}).pause_ms == pytest.approx(700)


def test_a_gap_long_after_the_change_or_before_it_is_not_its_doing():
    earlier = [*steps(1.0), *before()]
    late = [*after(10.2), step(19.0, generation=2)]

    assert measure(event(), {1: [*earlier, *late]}).pause_ms == pytest.approx(100)


def test_a_step_that_ends_between_the_event_and_its_effect_splits_the_gap():
    lines = [*before(), step(10.1), *after(10.5)]

    assert measure(event(), {1: lines}).pause_ms == pytest.approx(300)


def test_the_shorter_of_the_two_usual_steps_is_taken_off():
    fewer_workers = after(10.5, seconds=0.02)

    found = measure(event(), {1: [*before(), *fewer_workers]})
    assert found.pause_ms == found.beyond_next_ms == pytest.approx(480)


def test_where_more_workers_make_longer_steps_it_is_told_how_much_of_the_gap_is_one_of_those():
    found = measure(event(), {1: [*before(), *after(10.5, seconds=0.3)]})
    assert found.pause_ms == pytest.approx(400)
    assert found.beyond_next_ms == pytest.approx(200)


def test_the_limit_that_a_job_was_told_to_wait_is_taken_off_but_not_from_the_raw_pause():
    change = measure(event(kind="hang", limit_s=1.0), {1: [*before(), *after(11.3)]})

    assert change.pause_ms == pytest.approx(200)
    assert change.raw_ms == pytest.approx(1200)


def test_discarded_steps_are_counted_once_however_many_workers_lost_them():
    broken = {w: Line(kind="discarded", worker=w, pid=w, time=10.2) for w in (1, 2)}
    unrelated = Line(kind="discarded", worker=1, pid=1, time=9.55)
    records = {
        w: sorted([*before(worker=w, pid=w), broken[w], *after(10.5, worker=w, pid=w)], key=by_time)
        for w in (1, 2)
    }
    records[1].insert(0, unrelated)

    assert measure(event(survivors=(1, 2)), records).discarded_steps == 1


def by_time(line):
    return line.time


def test_a_survivor_with_another_process_id_is_noticed():
    same = measure(event(), {1: [*before(), *after(10.5)]})
    other = measure(event(), {1: [*before(), *after(10.5, pid=101)]})

    assert same.pids_unchanged
    assert not other.pids_unchanged


def test_a_survivor_without_steps_is_refused():
    with pytest.raises(ValueError, match="made no step before it, or not two after it"):
        measure(event(), {1: before()})
    with pytest.raises(ValueError, match="made no step before it, or not two after it"):
        measure(event(), {1: after(10.5)})


def membership(number, *members, cause="join", time=0.0):
    return Membership(number=number, members=members, cause=cause, time=time)


def joined(worker, ready, first, *, generation):
    ready_line = Line(kind="ready", worker=worker, pid=worker, time=ready)
    return [ready_line, *every(0.1, start=first, count=11, worker=worker, generation=generation)]


def test_a_join_is_found_and_measured_from_the_membership_that_lets_the_worker_in():
    records = {1: [*before(), *after(10.4)], 2: joined(2, 10.01, 10.35, generation=2)}
    memberships = [membership(1, 1, cause="start"), membership(2, 1, 2, time=10.05)]

    (found,) = joins(memberships, records)
    change = measure(found, records)

    assert (found.begin, found.survivors, found.joined) == (10.05, (1,), (2,))
    assert change.kind == "join"
    assert change.workers == 2
    assert change.pause_ms == pytest.approx(300)
    assert change.ready_to_first_step_ms == (pytest.approx(340),)


def test_a_membership_in_which_nobody_made_a_step_counts_with_the_next():
    third = [step(10.5 + i / 10, generation=3) for i in range(11)]
    records = {
        1: [*before(), *third],
        2: joined(2, 10.0, 10.5, generation=3),
        3: joined(3, 10.0, 10.5, generation=3),
    }
    memberships = [
        membership(1, 1, cause="start"),
        membership(2, 1, 2, time=10.05),
        membership(3, 1, 2, 3, time=10.1),
    ]

    (found,) = joins(memberships, records, kind="refill")

    assert (found.kind, found.begin, found.joined) == ("refill", 10.05, (2, 3))


def test_two_joins_one_after_the_other_have_a_gap_each():
    records = {
        1: [*before(), step(10.3, generation=2), *every(0.1, start=10.9, count=11, generation=3)],
        2: joined(2, 10.0, 10.3, generation=2),
        3: joined(3, 10.0, 10.9, generation=3),
    }
    memberships = [
        membership(1, 1, cause="start"),
        membership(2, 1, 2, time=10.05),
        membership(3, 1, 2, 3, time=10.35),
    ]

    records[2] += steps(10.9, 11.0, generation=3)

    first, second = joins(memberships, records)

    assert measure(first, records).pause_ms == pytest.approx(200)
    assert second.begin == 10.35


def test_neither_a_leave_nor_a_worker_that_comes_back_is_a_join():
    records = {
        1: [*before(), *after(10.4)],
        2: [*before(worker=2), *every(0.1, start=11.6, count=11, worker=2, generation=3)],
    }
    memberships = [
        membership(1, 1, 2, cause="start"),
        membership(2, 1, cause="hang", time=10.1),
        membership(3, 1, 2, time=11.5),
    ]

    assert joins(memberships, records) == []


def change(kind="join", pause_ms=10.0, **fields):
    defaults = {
        "workers": 2,
        "raw_ms": pause_ms,
        "beyond_next_ms": pause_ms - 1,
        "median_step_ms": 5.0,
        "undisturbed_ms": 1.0,
        "discarded_steps": 0,
        "pids_unchanged": True,
    }
    return Change(kind=kind, pause_ms=pause_ms, **(defaults | fields))


def test_changes_are_summed_up_as_median_and_maximum():
    rows = [change(pause_ms=ms, discarded_steps=1) for ms in (30.0, 10.0, 80.0)]

    found = {"n": 3, "median_ms": 30.0, "max_ms": 80.0, "median_beyond_next_ms": 29.0}
    assert summarize(rows) == found | {"discarded_steps": 3}
    assert summarize([])["median_ms"] is None


def test_goals_are_on_medians_and_a_leave_may_discard_nothing():
    rows = [change(pause_ms=99.0), change("leave", 101.0, discarded_steps=1), change("kill", 251.0)]
    result = summary({"1M": rows}, stalled={"1M": 0}, torchrun=None)
    found = {goal["goal"]: goal["met"] for goal in result["goals"]}

    assert found == {
        "1M join median_ms": True,
        "1M leave median_ms": False,
        "1M kill median_ms": False,
        "1M kill_rank0 median_ms": False,
        "1M kill_two median_ms": False,
        "1M hang median_ms": False,
        "1M leave discarded_steps": False,
        "1M stalled": True,
    }
    assert goals_of({"20k": {}}) == []


def test_processor_time_of_a_step_is_that_of_all_workers():
    lines = [
        step(float(number), worker=worker, number=number, cpu=worker + number * 0.004)
        for worker in (0, 1)
        for number in range(101)
    ]

    assert steady.cpu_ms_per_step(lines, first=50, last=100) == pytest.approx(8.0)
    with pytest.raises(ValueError, match="steps 50 to 150 were not all made by 2 workers"):
        steady.cpu_ms_per_step(lines, first=50, last=150)


def test_a_block_of_steps_that_was_slowed_down_does_not_change_the_processor_time():
    slow = [0.5 if number > 120 else 0.0 for number in range(201)]
    lines = [
        step(float(number), worker=worker, number=number, cpu=number * 0.004 + slow[number])
        for worker in (0, 1)
        for number in range(201)
    ]

    assert steady.cpu_ms_per_step(lines, first=50, last=200) == pytest.approx(8.0)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a benchmark and return its JSON; one that takes too long ends what it started."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def run(module, *options, limit_s):
        command = [sys.executable, "-m", module, "--json", "-", *options]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as benchmark:
            try:
                out, err = benchmark.communicate(timeout=limit_s)
            finally:
                benchmark.terminate()
        assert benchmark.returncode == 0, err
        return json.loads(out)

    return run


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_the_benchmark_of_changes_measures_every_kind(run):
    result = run("benchmarks.resize", "--quick", limit_s=200)

    rows = result["sizes"]["20k"]
    for kind in ("join", "leave", "kill", "kill_rank0", "kill_two", "hang"):
        assert rows[kind]["n"] >= 2, kind
        assert rows[kind]["max_ms"] < 10_000, kind
    assert rows["leave"]["discarded_steps"] == 0
    assert rows["stalled"] == 0
    assert result["pids_unchanged"] is True
    assert result["ready_to_first_step_ms"]["median"] > 0
    assert result["torchrun"] is None
    assert result["goals"] == []


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_the_benchmark_of_steady_training_compares_both_launchers(run):
    options = ("--pairs", "1", "--steps", "80", "--parameters", "20000")
    result = run("benchmarks.steady", *options, limit_s=120)

    assert [row["n"] for row in result["rows"]] == [1, 1]
    assert all(milliseconds > 0 for milliseconds in result["cpu_ms_per_step"].values())
