"""What users have in an elastic job: batch statistics, evaluation, their own errors, telemetry.

Numbers in brackets are rows of docs/reports.md.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from elastic_audit import audit, check_events
from supervisor import supervising

from elastane.protocol import Broken, Entered
from elastane.telemetry import read_events

processes = pytest.mark.processes


@pytest.fixture
def supervisor(tmp_path):
    with supervising(tmp_path) as one:
        yield one


def merged(statistics):
    """Return the statistics of several workers' batches together."""
    means, variances, counts = (
        torch.stack([torch.tensor(one[place], dtype=torch.float64) for one in statistics])
        for place in range(3)
    )
    variance = variances.mean(0) + means.var(0, correction=0)
    return [means.mean(0), variance, counts.mean().round()]


def statistics_after(supervisor, worker, position):
    steps = {step["position"]: step for step in supervisor.records(worker, "step")}
    return steps[position]["statistics"]


def check_merged(supervisor, generation, *, of):
    """Check that all who opened a generation hold the merged statistics of some workers."""
    found = [o for o in supervisor.all_records("generation") if o["generation"] == generation]
    position = found[0]["position"]
    expected = merged([statistics_after(supervisor, worker, position) for worker in of])
    for one in found:
        for own, wanted in zip(one["statistics"], expected, strict=True):
            own_values = torch.tensor(own, dtype=torch.float64)
            torch.testing.assert_close(own_values, wanted, rtol=1e-9, atol=1e-12)


@processes
def test_batch_statistics_are_merged_at_each_change_without_those_of_newcomers(supervisor):
    options = {"batch_norm": True, "dtype": "float64"}
    supervisor.start(4, **options)
    supervisor.begin(1, 2, 3, **options)
    supervisor.let_train(1)
    supervisor.wait_ready(4)
    supervisor.change(1, 4, 2, 3)
    supervisor.let_train(4)
    supervisor.change(1, 2, 3, cause="leave", dismissed=(4,))
    supervisor.let_train(1)
    supervisor.kill(2)
    supervisor.change(1, 3, cause="death", lost=(2,))
    supervisor.let_train(1)
    supervisor.finish()
    audit(supervisor)  # which finds the survivors' statistics equal, too
    check_merged(supervisor, 2, of=(1, 2, 3))
    check_merged(supervisor, 3, of=(1, 2, 3))


# [7] [13]
@processes
def test_an_evaluation_survives_the_death_of_its_first_worker_and_no_newcomer_disturbs_it(
    supervisor,
):
    supervisor.start(4, evaluate_every=20)
    supervisor.wait_ready(4)
    supervisor.begin(1, 2, 3, evaluate_every=20)
    supervisor.wait_held("evaluation", 1, 2, 3)
    supervisor.kill(1)
    supervisor.publish(4, 2, 3, cause="death", lost=(1,))
    supervisor.open_gate("evaluation")
    supervisor.wait_entered()
    supervisor.wait_until(lambda: supervisor.records(4, "evaluation") != [])
    supervisor.finish()
    check_events(supervisor, audit(supervisor))
    evaluations = {worker: supervisor.records(worker, "evaluation") for worker in (2, 3, 4)}
    assert evaluations[2][0]["step"] == evaluations[3][0]["step"] == 20
    assert evaluations[4][0]["step"] == 40
    for step in (20, 40):
        found = [e["sums"] for all_of in evaluations.values() for e in all_of if e["step"] == step]
        assert all(sums == found[0] for sums in found)
        assert found[0]["indices"] == 301 * 300 / 2
    places = {(o["generation"], o["world_size"]) for o in supervisor.all_records("generation")}
    assert places == {(1, 3), (2, 3)}


@processes
def test_who_fails_fails_alone(supervisor):
    supervisor.start(3, fail_at=0)
    supervisor.start(4, loader_seed=4)
    supervisor.start(5, num_steps=77)
    supervisor.begin(1, 2)
    assert supervisor.exit_code(3) == 1  # in its rehearsal, before it was in
    supervisor.start(6, fail_at=1)
    supervisor.wait_ready(6)
    supervisor.change(1, 2, 6)
    assert supervisor.exit_code(6) == 1
    supervisor.wait_for(Broken, worker=1, generation=2)
    supervisor.change(1, 2, cause="death", lost=(6,))
    supervisor.wait_ready(4, 5)
    supervisor.publish(4, 1, 2, 5)
    assert [supervisor.exit_code(worker) for worker in (4, 5)] == [1, 1]
    supervisor.wait_for(Broken, worker=1, generation=4)
    supervisor.change(1, 2, cause="death", lost=(4, 5))
    supervisor.let_train(1, 2)
    supervisor.finish()
    check_events(supervisor, audit(supervisor))
    assert "the user's own mistake" in supervisor.log(3)
    assert "the user's own mistake" in supervisor.log(6)
    assert "StateError" in supervisor.log(4)
    assert "seed=4" in supervisor.log(4)
    assert "num_steps=77" in supervisor.log(5)
    assert supervisor.complaints(1, 2) == []


def children(pid):
    """Return the processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


@processes
def test_loader_processes_end_with_their_worker_and_keep_its_death_from_nobody(supervisor):
    supervisor.begin(1, 2, 3, num_workers=1)
    supervisor.let_train(1)
    loaders = children(supervisor.processes[2].pid)
    assert loaders
    supervisor.kill(2)
    for worker in (1, 3):
        supervisor.wait_until(lambda w=worker: supervisor.beat(w).generation == 0, timeout_s=3)
    supervisor.change(1, 3, cause="death", lost=(2,))
    supervisor.wait_until(lambda: not any(map(is_running, loaders)))
    supervisor.let_train(1, 3)
    supervisor.finish()
    check_events(supervisor, audit(supervisor))


@processes
def test_events_tell_each_change_with_its_cause_and_pause_and_steps_with_their_generation(
    supervisor,
):
    supervisor.start(3)
    supervisor.begin(1, 2)
    supervisor.let_train(1)
    supervisor.wait_ready(3)
    supervisor.change(1, 2, 3)
    supervisor.let_train(1)
    supervisor.kill(1)
    supervisor.change(2, 3, cause="death", lost=(1,))
    supervisor.let_train(2)
    supervisor.change(3, cause="leave", dismissed=(2,))
    supervisor.let_train(3)
    supervisor.finish()
    check_events(supervisor, audit(supervisor))
    events = read_events(supervisor.folder / "run")
    changes = [event for event in events if event["event"] == "membership"]
    told = [(event["generation"], event["cause"], event["world_size"]) for event in changes]
    assert told == [(2, "join", 3), (3, "death", 2), (4, "leave", 1)]
    pauses = [float(str(event["pause_s"])) for event in changes]
    assert all(0 <= pause < 5 for pause in pauses)
    assert [event["generation"] for event in events if event["event"] == "start"] == [1]
    assert [event["cause"] for event in events if event["event"] == "end"] == ["stopped"]


@processes
def test_a_hang_of_the_first_worker_is_told_by_the_next(supervisor):
    supervisor.begin(1, 2, 3)
    supervisor.let_train(1)
    supervisor.send_signal(signal.SIGSTOP, 1)
    entered = supervisor.change(2, 3, cause="hang", lost=(1,))
    step = supervisor.wait_for(Entered, worker=2, generation=entered.number).step
    supervisor.let_train(2)
    supervisor.finish()
    check_events(supervisor, audit(supervisor))
    changes = [e for e in read_events(supervisor.folder / "run") if e["event"] == "membership"]
    assert [(e["cause"], e["step"]) for e in changes] == [("hang", step)]


@processes
def test_the_step_before_one_that_is_skipped_is_told_too(supervisor):
    supervisor.begin(1, 2, nan_at=10)
    supervisor.let_train(1, steps=20)
    supervisor.finish()
    committed = audit(supervisor)
    skipped = [step for step in supervisor.records(1, "step") if step["skipped"]]
    assert [step["step"] for step in skipped] == [9]
    check_events(supervisor, committed)
