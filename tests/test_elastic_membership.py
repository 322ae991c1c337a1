"""Workers that come, go, die, hang and come back: what the others do then.

Numbers in brackets are rows of docs/reports.md.
"""

from __future__ import annotations

import signal
import time

import pytest
from elastic_audit import audit, check_events, discarded, foreign
from supervisor import Supervisor, supervising

from elastane import protocol
from elastane.elastic.meeting import Arrival
from elastane.protocol import Entered, Hello, Ready

processes = pytest.mark.processes
PROMPTLY_S = 3  # on a machine that does much else; a step that nobody breaks blocks for minutes


@pytest.fixture
def supervisor(tmp_path):
    with supervising(tmp_path) as one:
        yield one


def position_at(supervisor, generation):
    openings = supervisor.all_records("generation")
    (position,) = {one["position"] for one in openings if one["generation"] == generation}
    return position


def seconds_to_enter(supervisor, *members, **fields):
    begun = time.monotonic()
    supervisor.change(*members, **fields)
    return time.monotonic() - begun


def wait_blocked(supervisor, worker):
    """Wait until a worker has made no step for many of its beats."""

    def is_blocked():
        before = supervisor.beat(worker)
        supervisor.wait_until(lambda: supervisor.beat(worker).count >= before.count + 6)
        return supervisor.beat(worker).step == before.step

    supervisor.wait_until(is_blocked)


# BC-49
# [1] [3] [5] [10] [11] [18] [19]
@processes
def test_joins_and_planned_leaves_lose_no_step_and_no_sample_and_go_never_back(supervisor):
    supervisor.begin(1, 2, is_fresh=True)
    supervisor.start(3)
    supervisor.let_train(1, 2, steps=60)  # into a later epoch
    supervisor.wait_ready(3)
    supervisor.change(1, 2, 3)
    supervisor.let_train(3)
    supervisor.change(2, 3, cause="leave", dismissed=(1,))
    assert supervisor.exit_code(1) == 0
    supervisor.let_train(2, 3)
    supervisor.finish()
    committed = audit(supervisor)
    assert discarded(supervisor) == []
    assert position_at(supervisor, 2) > 301
    assert {step["generation"] for step in committed} == {1, 2, 3}
    check_events(supervisor, committed)
    assert len(supervisor.facts) == len({*map(str, supervisor.facts)})
    assert supervisor.complaints(1, 2, 3) == []


# [2] [7] [27]
@processes
def test_the_first_worker_or_two_at_once_may_die_and_each_sample_counts_once(supervisor):
    supervisor.begin(1, 2, 3, 4)
    supervisor.let_train(1)
    supervisor.kill(1)
    assert seconds_to_enter(supervisor, 2, 3, 4, cause="death", lost=(1,)) < PROMPTLY_S
    supervisor.let_train(2, 3, 4)
    supervisor.kill(2, 4)
    assert seconds_to_enter(supervisor, 3, cause="death", lost=(2, 4)) < PROMPTLY_S
    supervisor.let_train(3)
    supervisor.finish()
    committed = audit(supervisor)
    assert [step["world_size"] for step in committed if step["generation"] == 3][-1] == 1
    check_events(supervisor, committed)


# [16] [22]
@processes
@pytest.mark.parametrize("dying", [1, 3])
def test_a_death_between_the_first_two_steps_of_a_group_holds_nobody_up(supervisor, dying):
    others = [worker for worker in (1, 2, 3, 4) if worker != dying]
    supervisor.start(dying, dies_in=2)
    supervisor.begin(*others)
    supervisor.publish(1, 2, 3, 4)
    assert supervisor.exit_code(dying) == -signal.SIGKILL
    wait_blocked(supervisor, others[0])
    assert seconds_to_enter(supervisor, *others, cause="death", lost=(dying,)) < PROMPTLY_S
    supervisor.let_train(*others)
    supervisor.finish()
    check_events(supervisor, audit(supervisor))


# [6] [16] [21]
@processes
def test_a_hung_member_holds_nobody_up_once_it_is_given_up_and_can_only_rejoin(supervisor):
    supervisor.start(1, plain_backward=True)
    supervisor.begin(2, 3)
    supervisor.change(1, 2, 3)
    supervisor.let_train(1)
    supervisor.send_signal(signal.SIGSTOP, 2)
    wait_blocked(supervisor, 1)
    wait_blocked(supervisor, 3)
    assert seconds_to_enter(supervisor, 1, 3, cause="hang", lost=(2,)) < PROMPTLY_S
    supervisor.let_train(1, 3, steps=30)
    supervisor.send_signal(signal.SIGCONT, 2)
    supervisor.wait_ready(2, count=2)
    supervisor.change(1, 3, 2)
    supervisor.let_train(1, 2, 3)
    supervisor.finish()
    committed = audit(supervisor)
    check_events(supervisor, committed)
    assert {step["generation"] for step in committed} >= {2, 3, 4}
    assert supervisor.complaints(1, 2, 3) == []


# [4] [20]
@processes
def test_a_joiner_that_stops_or_dies_anywhere_on_its_way_in_holds_nobody_up(supervisor):
    supervisor.start(3, 4, 5, 6, 7, width=4000)
    supervisor.begin(1, 2, width=4000)
    supervisor.wait_ready(3, 4, 5, 6, 7)
    supervisor.let_train(1)
    supervisor.send_signal(signal.SIGSTOP, 3)
    supervisor.publish(1, 2, 3)
    wait_blocked(supervisor, 1)
    assert seconds_to_enter(supervisor, 1, 2) < PROMPTLY_S
    for joiner, after_s in ((4, 0.03), (5, 0.06), (6, 0.1)):
        let_in_and_signal(supervisor, joiner, signal.SIGSTOP, after_s=after_s)
        assert seconds_to_enter(supervisor, 1, 2) < PROMPTLY_S
        supervisor.let_train(1, steps=2)
    let_in_and_signal(supervisor, 7, signal.SIGKILL, after_s=0.02)
    assert seconds_to_enter(supervisor, 1, 2, cause="death", lost=(7,)) < PROMPTLY_S
    supervisor.let_train(1, 2)
    supervisor.finish()
    check_events(supervisor, audit(supervisor))


# [4] [20]
@processes
def test_a_joiner_that_was_left_behind_on_its_way_in_can_be_let_in_later(supervisor):
    supervisor.begin(1, 2)
    supervisor.start(3)
    for count in (1, 2, 3):
        supervisor.wait_ready(3, count=count, timeout_s=10)
        supervisor.send_signal(signal.SIGSTOP, 3)
        supervisor.publish(1, 2, 3)
        wait_blocked(supervisor, 1)
        supervisor.change(1, 2)
        supervisor.send_signal(signal.SIGCONT, 3)
    supervisor.wait_ready(3, count=4, timeout_s=10)
    supervisor.change(1, 2, 3)
    supervisor.let_train(3)
    supervisor.finish()
    audit(supervisor)


# [4] [22]
@processes
def test_the_next_newcomer_gets_in_after_one_that_vanished_while_its_group_was_opened(supervisor):
    supervisor.begin(1)
    supervisor.store.queue_push(protocol.INBOX, Ready(worker=9).to_json())
    meeting = f"{protocol.meeting_key(supervisor.publish(1, 9).number)}/1"
    supervisor.store.set(f"{meeting}/9", Arrival.NEWCOMER)
    supervisor.store.add(meeting, 1)  # that is all that is ever heard of it
    wait_blocked(supervisor, 1)
    supervisor.change(1, cause="death", lost=(9,))
    supervisor.start(2)
    supervisor.wait_ready(2)
    assert seconds_to_enter(supervisor, 1, 2) < PROMPTLY_S
    supervisor.let_train(2)
    supervisor.finish()
    check_events(supervisor, audit(supervisor))


def let_in_and_signal(
    supervisor: Supervisor, joiner: int, number: signal.Signals, *, after_s: float
) -> None:
    """Let a joiner in beside 1 and 2, and send it a signal soon after all have met."""
    meeting = f"{protocol.meeting_key(supervisor.publish(1, 2, joiner).number)}/1"
    supervisor.wait_until(lambda: supervisor.store.add(meeting, 0) == 3)
    time.sleep(after_s)  # a varied part of the way in
    supervisor.send_signal(number, joiner)


# [8] [22]
@processes
def test_newer_generations_may_come_at_any_time_while_an_older_one_is_entered(supervisor):
    supervisor.begin(1, 2, 3)
    supervisor.let_train(1)
    for burst in range(15):
        for gap in range(burst % 3):
            supervisor.publish(1, 2, 3)
            time.sleep(0.004 * (1 + (burst + gap) % 7))
        supervisor.publish(1, 2, 3)
        for worker in (1, 2, 3):
            number = supervisor.generation.number
            supervisor.wait_for(Entered, worker=worker, generation=number, timeout_s=PROMPTLY_S)
    supervisor.finish()
    check_events(supervisor, audit(supervisor))


@processes
def test_an_evicted_worker_is_not_told_of_steps_that_it_was_no_member_for(supervisor):
    supervisor.begin(1, 2, 3)
    supervisor.let_train(1)
    supervisor.change(1, 3)
    supervisor.let_train(1)
    supervisor.wait_ready(2, count=2)
    supervisor.change(1, 2, 3)
    supervisor.let_train(2)
    supervisor.finish()
    audit(supervisor)
    assert foreign(supervisor) == []


@processes
def test_members_wait_out_a_generation_that_does_not_train(supervisor):
    supervisor.begin(1, 2)
    supervisor.let_train(1)
    supervisor.publish(1, 2, cause="hold", go=False)
    for worker in (1, 2):
        supervisor.wait_until(lambda w=worker: supervisor.beat(w).generation == 0)
    supervisor.change(2, 1)
    supervisor.let_train(1, 2)
    supervisor.finish()
    committed = audit(supervisor)
    assert discarded(supervisor) == []
    assert {step["generation"] for step in committed} == {1, 3}


@processes
def test_facts_tell_who_came_from_where_and_at_which_step(supervisor):
    supervisor.begin(5, 7)
    supervisor.start(6)
    supervisor.wait_ready(6)
    supervisor.let_train(5)
    supervisor.change(6, 5, 7)
    hello = supervisor.wait_for(Hello, worker=6)
    assert (hello.agent, hello.slot, hello.pid) == ("test", 6, supervisor.processes[6].pid)
    entered = supervisor.wait_for(Entered, worker=6, generation=2)
    assert entered.source in (5, 7)
    supervisor.wait_until(lambda: supervisor.beat(6).status.get("step", 0) > entered.step)
    assert supervisor.beat(6).generation == 2
    supervisor.wait_until(lambda: supervisor.beat(5).generation == 2)
    assert supervisor.beat(5).status == {}
    supervisor.finish()
    committed = audit(supervisor)
    assert next(s["step"] for s in committed if s["generation"] == 2) == entered.step + 1
