"""Everybody dies, the store is lost, the job stops, a machine goes away: what is left then.

Numbers in brackets are rows of docs/reports.md.
"""

from __future__ import annotations

import signal

import pytest
from elastic_audit import audit, discarded
from supervisor import supervising

from elastane.elastic.checkpoint import CheckpointStore
from elastane.protocol import Entered, Hello, Leaving, Ready

processes = pytest.mark.processes


def newest_step(supervisor):
    checkpoint = CheckpointStore(supervisor.folder / "run" / "checkpoints").newest()
    return 0 if checkpoint is None else checkpoint.manifest.step


def committed_step(supervisor, *workers):
    return max(supervisor.records(worker, "step")[-1]["step"] for worker in workers)


def opening(supervisor, worker):
    return supervisor.records(worker, "generation")[-1]


# [14] [24] [26]
@processes
@pytest.mark.timeout(180)
def test_after_the_loss_of_all_workers_any_number_goes_on_at_most_one_interval_back(tmp_path):
    every = 4
    options = {"checkpoint_every": every, "chunk": 301, "step_s": 0.02}
    with supervising(tmp_path) as supervisor:
        supervisor.begin(1, 2, **options)
        for gate in (0, 1, 2):
            supervisor.wait_held(gate, 1, 2)
            supervisor.open_gate(gate)
        supervisor.wait_held(3, 1, 2)  # at the very end of the third epoch
        before = committed_step(supervisor, 1, 2)
        supervisor.wait_until(lambda: newest_step(supervisor) >= before - every)
        supervisor.kill(1, 2)

        supervisor.begin(3, **options)
        first = newest_step(supervisor)
        supervisor.wait_held(3, 3)
        assert supervisor.records(3, "step")[0]["step"] == first + 1
        alone = committed_step(supervisor, 3)
        supervisor.open_gate(3)
        supervisor.wait_until(lambda: newest_step(supervisor) > alone)
        supervisor.kill(3)

        resumed = newest_step(supervisor)
        supervisor.begin(4, 5, 6, **options)
        supervisor.open_gate(4)
        supervisor.let_train(4, steps=2)
        supervisor.finish()
        assert supervisor.records(6, "step")[0]["step"] == resumed + 1
        committed = audit(supervisor)
        assert committed[-1]["position"] > 3 * 301

        supervisor.begin(7, **options)
        assert supervisor.exit_code(7) == 0
        assert supervisor.records(7, "step") == []
        audit(supervisor)


# [24]
@processes
def test_a_run_that_was_lost_exactly_at_the_end_of_an_epoch_begins_the_next_one(tmp_path):
    options = {"num_samples": 64, "checkpoint_every": 8, "chunk": 65, "step_s": 0.01}
    with supervising(tmp_path) as supervisor:
        supervisor.begin(1, **options)
        supervisor.open_gate(0)
        supervisor.wait_held(1, 1)
        supervisor.wait_until(lambda: newest_step(supervisor) == 8)
        supervisor.kill(1)
        supervisor.begin(2, 3, **options)
        supervisor.open_gate(1)
        supervisor.let_train(2, 3, steps=2)
        assert opening(supervisor, 2)["position"] == opening(supervisor, 3)["position"] == 64
        (tmp_path / "stop").touch()
        for gate in range(2, 9):
            supervisor.open_gate(gate)
        supervisor.finish()
        audit(supervisor, num_samples=64)


# [7]
@processes
def test_training_goes_on_without_a_store_and_changes_go_on_with_the_next(tmp_path):
    with supervising(tmp_path, orphan_limit_s=300.0) as supervisor:
        supervisor.begin(1, 2)
        supervisor.start(3)
        supervisor.wait_ready(3)
        supervisor.let_train(1)
        supervisor.lose_store()
        known = committed_step(supervisor, 1)
        supervisor.wait_until(lambda: committed_step(supervisor, 1) > known + 30)
        supervisor.facts.clear()
        supervisor.open_store()
        for worker in (1, 2):
            hello = supervisor.wait_for(Hello, worker=worker)
            assert hello.generation["number"] == 1
            assert tuple(hello.generation["members"]) == (1, 2)
        supervisor.wait_ready(3)
        number = supervisor.publish(1, 2, 3).number
        supervisor.wait_for(Entered, worker=3, generation=number, timeout_s=15)
        supervisor.let_train(3)
        supervisor.finish()
        audit(supervisor)
        assert discarded(supervisor) == []


@processes
def test_workers_without_a_launcher_for_too_long_write_a_checkpoint_and_leave(tmp_path):
    with supervising(tmp_path, orphan_limit_s=1.0) as supervisor:
        supervisor.begin(1, 2)
        supervisor.let_train(1)
        supervisor.lose_store()
        assert [supervisor.exit_code(worker) for worker in (1, 2)] == [75, 75]
        complaints = supervisor.complaints(1, 2)
        assert all("there is no launcher any more" in line for line in complaints)
        assert newest_step(supervisor) == committed_step(supervisor, 1, 2)
        audit(supervisor)
        assert discarded(supervisor) == []


@processes
def test_a_job_that_stops_leaves_the_newest_step_in_a_checkpoint_and_resumes_from_it(tmp_path):
    with supervising(tmp_path) as supervisor:
        supervisor.begin(1, 2)
        supervisor.let_train(1)
        supervisor.publish(cause="stop", dismissed=(1, 2))
        assert [supervisor.exit_code(worker) for worker in (1, 2)] == [0, 0]
        stopped = committed_step(supervisor, 1, 2)
        assert newest_step(supervisor) == stopped
        assert discarded(supervisor) == []
        audit(supervisor)
    with supervising(tmp_path) as supervisor:
        supervisor.begin(3, 4, 5)
        supervisor.let_train(3)
        supervisor.finish()
        assert supervisor.records(3, "step")[0]["step"] == stopped + 1


@processes
def test_a_worker_that_is_asked_to_leave_in_its_rehearsal_ends_at_once(tmp_path):
    with supervising(tmp_path) as supervisor:
        supervisor.begin(1)
        supervisor.start(2, step_s=80)
        supervisor.wait_for(Hello, worker=2)
        supervisor.send_signal(signal.SIGTERM, 2)
        assert supervisor.exit_code(2) == 0
        assert not any(isinstance(fact, Ready) and fact.worker == 2 for fact in supervisor.facts)
        supervisor.let_train(1)
        supervisor.finish()
        audit(supervisor)


@processes
def test_a_worker_that_is_asked_to_leave_says_so_and_leaves_when_it_is_dismissed(tmp_path):
    with supervising(tmp_path) as supervisor:
        supervisor.start(3, 4)
        supervisor.begin(1, 2)
        supervisor.wait_ready(3)
        supervisor.send_signal(signal.SIGTERM, 3)
        assert supervisor.exit_code(3) == 0  # it was not in yet
        supervisor.wait_for(Hello, worker=4)
        supervisor.send_signal(signal.SIGTERM, 2)
        supervisor.wait_for(Leaving, worker=2)
        supervisor.let_train(1, 2)  # nobody has let it go yet
        supervisor.change(1, cause="leave", dismissed=(2,))
        assert supervisor.exit_code(2) == 0
        supervisor.wait_ready(4)
        supervisor.change(4, 1)
        supervisor.send_signal(signal.SIGTERM, 4)
        supervisor.wait_for(Leaving, worker=4)
        supervisor.send_signal(signal.SIGTERM, 4)
        assert supervisor.exit_code(4) == 128 + signal.SIGTERM
        supervisor.change(1, cause="death", lost=(4,))
        supervisor.finish()
        audit(supervisor)
        assert supervisor.complaints(1, 2, 3, 4) == []
