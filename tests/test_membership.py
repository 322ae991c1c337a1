"""Who takes part next: examples, one for each rule, and properties of whole histories."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastane.launch import facts
from elastane.launch.report import report
from elastane.launch.staffing import End, Release, Start, ordered, staff
from elastane.launch.verdict import judge, may_restart, restart_all
from elastane.membership import decide, exit_sentence, name_workers
from elastane.protocol import (
    AgentHere,
    Beat,
    Broken,
    Done,
    Draining,
    Entered,
    Exited,
    Generation,
    Hello,
    Leaving,
    Ready,
    parse_fact,
    parse_order,
)
from elastane.roster import Roster, Rules

RULES = Rules(min_workers=1, max_workers=4, hang_limit_s=10.0)


class Job:
    """A job without processes: facts go in, decisions are carried out, time is a number."""

    def __init__(self, *, rules=RULES, target=None, slots=4, agents=("here",)):
        self.rules = rules
        self.now = Generation()
        self.time = 0.0
        self.next_worker = 1
        self.roster = Roster(target=target or rules.max_workers)
        self.orders = []
        self.history = []
        for agent in agents:
            self.fold(AgentHere(agent=agent, host=agent, slots=slots, pid=1))

    def fold(self, fact):
        told = parse_fact(fact.to_json())  # as it arrives
        self.roster = facts.fold(self.roster, told, now=self.now, time=self.time)

    def act(self):
        """Decide, publish and staff once; return the generation, if there is a new one."""
        known = {"rules": self.rules, "time": self.time}
        decision = decide(self.now, self.roster, **known)
        if decision is not None:
            values = {name: getattr(decision, name) for name in decision.__slots__}
            self.now = Generation(number=self.now.number + 1, time=0.0, **values)
            self.roster = facts.publish(self.roster, self.now, time=self.time)
            self.history.append(self.now)
        if may_restart(self.roster, **known):
            self.roster = restart_all(self.roster, time=self.time)
        for order in staff(self.now, self.roster, **known):
            self.orders.append(order)
            worker = self.next_worker
            self.next_worker += isinstance(order, Start)
            self.roster = ordered(self.roster, order, worker=worker, time=self.time)
        self.roster = facts.forget(self.roster, now=self.now)
        return self.now if decision is not None else None

    def verdict(self):
        return judge(self.now, self.roster, rules=self.rules, time=self.time)

    def hello(self, *workers):
        for w in workers:
            place = self.roster.workers.get(w)
            agent, slot = (place.agent, place.slot) if place else ("here", w - 1)
            self.fold(Hello(worker=w, agent=agent, slot=slot, pid=w, host="here"))

    def ready(self, *workers):
        self.hello(*workers)
        for w in workers:
            self.fold(Ready(worker=w))

    def enter(self, step=1):
        for w in self.now.members:
            if not self.roster.workers[w].exited:
                self.fold(Entered(worker=w, generation=self.now.number, step=step, source=w))

    def exit(self, *workers, code=-9, message="log:\nlast words"):
        for w in workers:
            self.fold(Exited(agent="here", worker=w, code=code, message=message))

    def beat(self, *workers, count=None, arrived=5, step=5, paused="", doing="train", met=0):
        beats = {
            w: Beat(
                count=count if count is not None else int(self.time * 100) + 1,
                generation=self.now.number,
                met=met.get(w, 0) if isinstance(met, dict) else met,
                step=step,
                arrived=arrived[w] if isinstance(arrived, dict) else arrived,
                paused=paused.get(w, "") if isinstance(paused, dict) else paused,
                doing=doing[w] if isinstance(doing, dict) else doing,
            )
            for w in workers
        }
        self.roster = facts.hear_workers(self.roster, beats, time=self.time)

    def hearts(self):
        counts = {a: agent.count + 1 for a, agent in self.roster.agents.items()}
        self.roster = facts.hear_agents(self.roster, counts, time=self.time)

    def pass_time(self, seconds, *, silent=(), **beat):
        """Let time pass in which all but some beat."""
        self.time += seconds
        self.hearts()
        live = [w.worker for w in self.roster.workers.values() if not w.exited]
        self.beat(*(w for w in live if w not in silent), **beat)


def training(workers=3, **options):
    """A job in which this many workers train."""
    job = Job(target=workers, **options)
    job.act()
    job.ready(*range(1, workers + 1))
    assert job.act().members == tuple(range(1, workers + 1))
    job.enter()
    return job


def test_the_first_generation_waits_for_all_that_were_started():
    job = Job(target=3)
    job.act()
    assert [o for o in job.orders if isinstance(o, Start)] == [
        Start(agent="here", slot=slot, rank=slot, expected_workers=3, retry=False)
        for slot in range(3)
    ]

    job.ready(1, 3)
    assert job.act() is None
    job.ready(2)

    first = job.act()
    assert (first.members, first.cause, first.go) == ((1, 2, 3), "start", True)
    assert first.reason == "workers 1, 2 and 3 start"


def test_the_first_generation_does_not_wait_for_ever():
    job = Job(target=3)
    job.act()
    job.ready(1, 2)
    job.pass_time(29)
    assert job.act() is None
    job.pass_time(2)

    assert job.act().members == (1, 2)


def test_the_first_generation_does_not_wait_for_the_dead_nor_for_the_next_in_their_slot():
    job = Job(target=3)
    job.act()
    job.ready(1, 2)
    job.exit(3, code=1)

    assert job.act().members == (1, 2)


def test_fewer_than_the_least_do_not_start():
    job = Job(rules=replace(RULES, min_workers=3), target=3)
    job.act()
    job.ready(1, 2)
    job.pass_time(100)

    assert job.act() is None


# [17]
def test_those_who_are_ready_at_the_same_moment_join_together_at_the_end():
    job = training(2)
    job.roster = replace(job.roster, target=4)
    job.act()
    job.ready(4, 3)

    joined = job.act()
    assert (joined.members, joined.cause) == ((1, 2, 3, 4), "join")
    assert (joined.lost, joined.dismissed) == ((), ())


# [17]
def test_more_than_wanted_are_not_admitted():
    job = training(2)
    job.ready(3)

    assert job.act() is None


# [17]
def test_a_standby_takes_a_dead_members_place_in_the_same_generation():
    job = training(2, rules=replace(RULES, standby=1))
    job.act()
    job.ready(3)
    assert job.act() is None
    job.exit(1)

    changed = job.act()
    assert (changed.members, changed.cause, changed.lost) == ((2, 3), "death", (1,))
    assert changed.reason == "worker 1 was killed by SIGKILL; worker 3 joins; 2 workers now"


def test_a_ready_worker_that_has_fallen_silent_is_not_admitted():
    job = training(2)
    job.roster = replace(job.roster, target=3)
    job.act()
    job.ready(3)
    job.pass_time(3, silent=[3])
    assert job.act() is None
    job.pass_time(0.1)

    assert job.act().members == (1, 2, 3)


@pytest.mark.parametrize("code", [-9, 1, 17])
def test_a_death_is_named_at_once_and_the_others_keep_their_order(code):
    job = training(3)
    job.exit(2, code=code)

    after = job.act()
    assert (after.members, after.cause, after.lost) == ((1, 3), "death", (2,))
    assert exit_sentence(2, code) in after.reason
    assert job.act() is None


def test_several_deaths_make_one_generation():
    job = training(4)
    job.exit(1, 4)

    assert job.act().lost == (1, 4)


def test_the_death_of_one_who_had_to_leave_is_named_while_others_may_wait_for_it():
    job = training(3)
    job.roster = replace(job.roster, target=2)
    assert job.act().dismissed == (3,)
    job.exit(3, code=-9)

    after = job.act()
    assert (after.members, after.lost, after.cause) == ((1, 2), (3,), "death")
    assert job.act() is None


def test_one_who_left_as_agreed_is_not_named():
    job = training(3)
    job.roster = replace(job.roster, target=2)
    job.act()
    job.exit(3, code=0)

    assert job.act() is None


def test_the_death_of_one_who_had_left_is_not_named_when_all_went_on():
    job = training(3)
    job.roster = replace(job.roster, target=2)
    job.act()
    job.enter()
    job.exit(3, code=-9)

    assert job.act() is None


def test_too_few_wait_and_go_on_when_enough_are_ready():
    job = training(3, rules=replace(RULES, min_workers=3))
    job.exit(2)
    hold = job.act()
    assert (hold.members, hold.go, hold.cause, hold.lost) == ((1, 3), False, "hold", (2,))
    job.enter()
    assert job.act() is None
    job.ready(4)

    again = job.act()
    assert (again.members, again.go, again.cause) == ((1, 3, 4), True, "join")


def test_on_hold_nobody_keeps_anybody_waiting():
    job = training(3, rules=replace(RULES, min_workers=3))
    job.exit(2)
    job.act()
    job.enter()
    for _ in range(30):
        job.pass_time(1, arrived={1: 5, 3: 6, 4: 0})
        job.act()

    assert job.now.members == (1, 3)


def test_a_worker_that_asks_leaves_as_agreed():
    job = training(2)
    job.fold(Leaving(worker=1, why="spot instance"))

    left = job.act()
    assert (left.members, left.cause, left.dismissed, left.lost) == ((2,), "leave", (1,), ())
    assert "spot instance" in left.reason


def test_an_agent_that_is_to_end_loses_its_workers_as_agreed_and_is_let_go():
    job = Job(agents=("a", "b"), slots=1, target=2)
    job.act()
    job.ready(1, 2)
    job.act()
    job.enter()
    job.fold(Draining(agent="b"))
    assert (job.act().dismissed, job.now.cause) == ((2,), "leave")
    job.enter()
    job.fold(Exited(agent="b", worker=2, code=0))
    job.act()

    assert job.orders[-1] == Release(agent="b")
    assert job.act() is None
    assert job.orders.count(Release(agent="b")) == 1


def test_leavers_wait_for_an_heir_if_there_is_one():
    job = training(1)
    job.fold(Leaving(worker=1, why="spot"))
    job.roster = replace(job.roster, target=2)
    job.ready(2)

    both = job.act()
    assert (both.members, both.cause, both.dismissed) == ((1, 2), "join", ())
    assert job.act() is None
    job.enter()
    assert (job.act().members, job.now.dismissed) == ((2,), (1,))


def test_if_everybody_leaves_they_write_a_checkpoint_and_others_start_from_it():
    job = training(2)
    for worker in (1, 2):
        job.fold(Leaving(worker=worker, why="spot"))

    alone = job.act()
    assert (alone.members, alone.dismissed, alone.cause) == ((), (1, 2), "leave")
    job.ready(3, 4)
    assert job.act() is None
    job.exit(1, 2, code=0)
    assert (job.act().members, job.now.cause, job.now.lost) == ((3, 4), "start", ())


def test_scaling_down_dismisses_the_newest_first():
    job = training(4)
    job.roster = replace(job.roster, target=2)

    less = job.act()
    assert (less.members, less.cause, set(less.dismissed)) == ((1, 2), "scale", {3, 4})


def test_a_dismissed_worker_that_stays_is_ended_after_its_grace():
    job = training(2)
    job.roster = replace(job.roster, target=1)
    job.act()
    job.pass_time(60)
    job.act()
    assert not [o for o in job.orders if isinstance(o, End)]
    job.enter()
    job.pass_time(11)
    job.act()

    assert job.orders[-1] == End(worker=2, grace_s=5.0)


def test_a_silent_worker_is_left_behind_comes_back_as_a_newcomer_or_is_ended():
    job = training(3)
    job.pass_time(9, silent=[1])
    assert job.act() is None
    job.pass_time(2, silent=[1])
    hang = job.act()
    assert (hang.members, hang.cause, hang.lost) == ((2, 3), "hang", (1,))
    assert "silent for 11.0 s" in hang.reason
    job.enter()
    job.pass_time(1)
    assert job.act() is None
    job.fold(Ready(worker=1))
    assert job.act().members == (2, 3, 1)
    job.enter()
    job.pass_time(11, silent=[1])
    job.act()
    job.enter()
    job.pass_time(11, silent=[1])
    job.act()

    assert End(worker=1, grace_s=0.0) in job.orders


def test_one_that_keeps_the_others_waiting_hangs_unless_it_said_so():
    job = training(3)
    for _ in range(9):
        job.pass_time(1, arrived={1: 5, 2: 4, 3: 5})
        assert job.act() is None
    job.pass_time(1, arrived={1: 5, 2: 4, 3: 5}, paused="evaluation")
    for _ in range(10):
        job.pass_time(1, arrived={1: 5, 2: 4, 3: 5})
        assert job.act() is None
    job.pass_time(2, arrived={1: 5, 2: 4, 3: 5})

    assert (job.act().lost, job.now.cause) == ((2,), "hang")


def test_one_that_is_behind_but_moves_is_waited_for():
    job = training(2)
    for step in range(30):
        job.pass_time(1, arrived={1: step, 2: step + 1})
        assert job.act() is None


def test_silence_while_entering_counts_sooner():
    job = training(2)
    job.roster = replace(job.roster, target=3)
    job.act()
    job.ready(3)
    job.act()
    job.pass_time(6, silent=[3])

    assert (job.act().lost, job.now.members) == ((3,), (1, 2))


def test_a_joiner_that_dies_before_it_entered_is_left_out_again():
    job = training(2)
    job.roster = replace(job.roster, target=3)
    job.act()
    job.ready(3)
    job.act()
    job.exit(3)

    assert (job.act().lost, job.now.members) == ((3,), (1, 2))


def test_a_silent_agent_costs_its_workers_which_may_come_back():
    job = Job(agents=("a", "b"), slots=1, target=2)
    job.act()
    job.ready(1, 2)
    job.act()
    job.enter()
    for _ in range(4):
        job.time += 1
        job.roster = facts.hear_agents(job.roster, {"a": int(job.time) + 9}, time=job.time)
        job.beat(1)
    lost = job.act()
    assert (lost.members, lost.cause, lost.lost) == ((1,), "lost", (2,))
    job.enter()
    job.pass_time(0.1)
    assert job.act() is None
    job.fold(Ready(worker=2))

    assert job.act().members == (1, 2)


def test_a_broken_group_without_a_death_meets_again_after_a_moment():
    job = training(2)
    job.fold(Broken(worker=1, generation=job.now.number, why="time-out"))
    assert job.act() is None
    job.pass_time(0.4)

    again = job.act()
    assert (again.members, again.cause, again.lost) == ((1, 2), "broken", ())
    assert job.act() is None


def test_a_death_explains_a_broken_group():
    job = training(3)
    job.fold(Broken(worker=1, generation=job.now.number, why="connection closed"))
    job.exit(2)
    assert job.act().cause == "death"
    job.pass_time(1)

    assert job.act() is None


def test_news_of_an_older_generations_group_is_no_news():
    job = training(3)
    job.exit(2)
    job.act()
    job.fold(Broken(worker=1, generation=job.now.number - 1, why="late"))
    job.pass_time(1)

    assert job.act() is None


def test_a_group_that_breaks_again_leaves_out_newcomers_that_never_entered():
    job = training(2)
    job.roster = replace(job.roster, target=3)
    job.act()
    job.ready(3)
    job.act()
    for _ in range(2):
        job.fold(Broken(worker=1, generation=job.now.number, why="time-out"))
        job.pass_time(0.4)
        job.act()

    assert (job.now.members, job.now.lost) == ((1, 2), (3,))


def test_a_group_that_breaks_over_and_over_ends_the_job():
    job = training(2)
    for _ in range(5):
        assert job.verdict() is None
        job.fold(Broken(worker=1, generation=job.now.number, why="time-out"))
        job.pass_time(0.4)
        job.act()

    assert job.verdict().code == 1
    assert "broke 5 times in a row" in job.verdict().reason


def test_after_the_end_nobody_is_admitted_and_the_job_ends_well():
    job = training(2)
    job.roster = replace(job.roster, target=3)
    job.act()
    job.ready(3)
    job.fold(Done(worker=1, step=9))
    assert job.act() is None
    assert job.orders[-1] == End(worker=3, grace_s=5.0)
    job.fold(Done(worker=2, step=9))
    job.exit(1, 2, code=0)
    assert job.act() is None
    assert job.verdict() is None
    job.exit(3, code=-15)

    assert job.verdict().code == 0


def test_one_that_fails_after_the_end_makes_the_exit_code_1_and_stops_nobody():
    job = training(2)
    for worker in (1, 2):
        job.fold(Done(worker=worker, step=9))
    job.exit(1, code=1)
    assert job.act() is None
    assert job.verdict() is None
    job.exit(2, code=0)

    assert (job.verdict().code, job.verdict().state) == (1, "failed")


def test_one_that_had_not_reached_the_end_meets_the_others_that_have_not():
    job = training(3)
    job.fold(Done(worker=1, step=9))
    job.exit(2)

    late = job.act()
    assert (late.members, late.lost, late.dismissed) == ((3,), (2,), (1,))


def test_a_script_that_ends_without_reaching_the_end_is_over_too():
    job = training(2)
    job.exit(1, 2, code=0)

    assert job.verdict().code == 0


def test_stopping_dismisses_everybody_and_ends_with_0():
    job = training(2)
    job.roster = replace(job.roster, stopping=True)
    stop = job.act()
    assert (stop.members, stop.cause, stop.dismissed) == ((), "stop", (1, 2))
    assert job.act() is None
    job.pass_time(29)
    job.act()
    assert not [o for o in job.orders if isinstance(o, End)]
    job.exit(1, code=0)
    job.pass_time(2)
    job.act()
    assert job.orders[-1] == End(worker=2, grace_s=5.0)
    job.exit(2, code=-9)

    assert job.verdict().code == 0


def test_a_member_that_dies_is_replaced_at_once():
    job = training(2)
    job.exit(2)
    job.act()

    assert job.orders[-1] == Start(agent="here", slot=1, rank=1, expected_workers=2, retry=False)


def test_the_next_try_in_a_slot_waits_longer_after_each_early_death():
    job = training(2, slots=2)
    job.exit(2)
    times = []
    while len(times) < 9:
        known = job.next_worker
        job.act()
        if job.next_worker > known:
            times.append(job.time)
            job.exit(known, code=1)
        job.pass_time(0.5)

    assert [later - sooner for sooner, later in pairwise([0.0, *times])] == [
        *[0.0, 0.5, 1.0, 2.0, 4.0],
        *[8.0, 16.0, 30.0, 30.0],
    ]


# [9]
def test_too_many_early_deaths_end_the_job_with_the_reason():
    job = training(2, rules=replace(RULES, max_respawns=2), slots=2)
    job.exit(2)
    for _ in range(3):
        job.pass_time(30)
        job.act()
        job.exit(job.next_worker - 1, code=3)

    verdict = job.verdict()
    assert verdict.code == 1
    assert "3 workers in a row died in one slot" in verdict.reason
    assert "exited with code 3\nlog:\nlast words" in verdict.reason


def test_when_all_died_all_start_again_from_nothing():
    job = training(2)
    job.exit(1, 2)
    assert job.act() is None
    job.ready(3)
    assert job.act() is None
    job.ready(4)

    again = job.act()
    assert (again.members, again.cause, again.lost) == ((3, 4), "start", (1, 2))


def test_deaths_of_everybody_without_a_step_in_between_end_the_job():
    job = training(2)
    job.pass_time(1, step=100)
    for death in range(4):
        assert job.verdict() is None, death
        job.exit(*job.now.members)
        job.act()
        if job.verdict() is not None:
            break
        job.ready(job.next_worker - 2, job.next_worker - 1)
        job.act()
        job.enter(step=50)
        job.pass_time(1, step=100)

    assert death == 3  # the first death came after progress
    assert "all workers died 3 times without a step" in job.verdict().reason


def test_a_script_without_a_session_restarts_as_a_whole():
    job = Job(target=3)
    job.act()
    job.exit(2, code=1)
    job.act()
    assert job.next_worker == 4
    job.pass_time(11)
    job.act()
    assert [o for o in job.orders if isinstance(o, End)] == [
        End(worker=1, grace_s=5.0),
        End(worker=3, grace_s=5.0),
    ]
    job.exit(1, 3, code=-15)
    job.act()

    assert [o.rank for o in job.orders[-3:]] == [0, 1, 2]
    assert job.roster.attempt == 1
    job.exit(4, 5, 6, code=0)
    assert job.verdict().code == 0


def test_a_death_before_any_hello_is_not_held_against_a_script_that_opens_a_session_later():
    job = Job(target=2)
    job.act()
    job.exit(2, code=1)
    job.act()
    job.ready(1)
    job.pass_time(11)
    job.act()

    assert job.roster.attempt == 0
    assert job.now.members == (1,)


def test_scaling_a_script_without_a_session_restarts_it():
    job = Job(target=2)
    job.act()
    job.pass_time(11)
    job.roster = replace(job.roster, target=3)
    job.act()
    assert job.roster.attempt == 0  # a session may take its time to open

    job.pass_time(50)
    job.act()
    assert job.roster.attempt == 1
    assert job.roster.restarts == 0


def test_a_launcher_that_is_started_again_goes_on_with_who_is_there():
    before = Generation(number=7, members=(1, 2, 3), cause="join")
    job = Job(target=3)
    live = {"0": 1, "2": 3}
    job.fold(AgentHere(agent="here", host="here", slots=4, pid=1, workers=live))
    record = {n: getattr(before, n) for n in Generation.__slots__}
    for worker, slot in ((1, 0), (3, 2)):
        where = {"agent": "here", "slot": slot, "pid": worker, "host": "here"}
        job.fold(Hello(worker=worker, **where, generation=record))
    job.now = before
    job.next_worker = 4
    job.roster = facts.take_up(job.roster, before, time=job.time)

    lost = job.act()
    assert (lost.number, lost.members, lost.cause, lost.lost) == (8, (1, 3), "lost", (2,))
    assert job.orders[-1].slot == 1
    assert [w.worker for w in job.roster.workers.values()] == [1, 3, 4]


def test_the_report_tells_what_each_worker_does():
    job = training(2)
    job.roster = replace(job.roster, target=3)
    job.act()
    job.ready(3)
    job.act()
    shown = report(job.now, job.roster, rules=RULES, verdict=None, time=job.time)

    assert (shown["state"], shown["generation"], shown["target"]) == ("running", 2, 3)
    assert [w["rank"] for w in shown["workers"]] == [0, 1, 2]
    assert shown["last_change"]["pause_s"] is None
    job.enter()
    settled = report(job.now, job.roster, rules=RULES, verdict=None, time=job.time)
    assert [w["state"] for w in settled["workers"]] == ["training"] * 3
    assert settled["last_change"]["pause_s"] == 0.0


def test_names_and_exits_read_as_sentences():
    assert [name_workers(w) for w in ([], [1], [1, 2], [1, 2, 3])] == [
        "no worker",
        "worker 1",
        "workers 1 and 2",
        "workers 1, 2 and 3",
    ]
    assert exit_sentence(1, -11) == "worker 1 was killed by SIGSEGV"
    assert exit_sentence(1, None) == "worker 1 ended while no launcher watched it"


KINDS = ["ready", "enter", "kill", "fail", "leave", "scale", "time", "silence", "broken", "drain"]
EVENTS = st.lists(
    st.tuples(st.sampled_from([*KINDS, "zombie", "ready", "enter"]), st.integers(0, 7)),
    max_size=60,
)


def happen(job, event, number):
    live = [w.worker for w in job.roster.workers.values() if not w.exited]
    chosen = live[number % len(live)] if live else 0
    match event:
        case "ready":
            job.ready(*live[: number + 1])
        case "enter":
            job.enter(step=job.roster.best_step + 1)
        case "kill" | "fail" if live:
            job.exit(chosen, code=-9 if event == "kill" else 1)
        case "leave" if live:
            job.hello(chosen)
            job.fold(Leaving(worker=chosen, why="asked"))
        case "scale":
            least = job.rules.min_workers
            span = job.rules.max_workers - least + 1
            job.roster = replace(job.roster, target=least + number % span)
        case "time":
            job.pass_time(number)
        case "silence" if live:
            job.pass_time(1 + number, silent=[chosen])
        case "broken":
            job.fold(Broken(worker=chosen, generation=job.now.number, why="told"))
        case "drain" if number == 0:
            job.fold(Draining(agent="b"))
        case "zombie" if live:
            job.hello(chosen)
            job.fold(Ready(worker=chosen))


def check(before, after, job):
    assert after.number == before.number + 1
    assert len(set(after.members)) == len(after.members) <= job.rules.max_workers
    assert not set(after.members) & (set(after.lost) | set(after.dismissed))
    kept = [w for w in before.members if w in after.members]
    new = after.members[len(kept) :]
    assert list(after.members[: len(kept)]) == kept
    assert list(new) == sorted(new)
    assert after.reason
    assert after.go or len(after.members) < job.rules.min_workers
    assert not after.go or not after.members or len(after.members) >= job.rules.min_workers
    gone = set(before.members) - set(after.members)
    assert gone <= set(after.lost) | set(after.dismissed)


@settings(max_examples=100, deadline=None)
@given(events=EVENTS, least=st.integers(1, 3))
def test_whatever_happens_generations_are_sound_and_come_to_rest(events, least):
    rules = replace(RULES, min_workers=least, max_respawns=1000, max_fruitless=1000)
    job = Job(rules=rules, agents=("a", "b"), slots=2)
    for event, number in events:
        happen(job, event, number)
        for _ in range(8):
            before = job.now
            if job.act() is None:
                break
            check(before, job.now, job)
        else:
            pytest.fail(f"no rest after {event}: {job.history[-3:]}")


@settings(max_examples=50, deadline=None)
@given(events=EVENTS)
def test_after_any_history_a_quiet_job_has_the_workers_that_are_wanted(events):
    rules = replace(RULES, max_respawns=1000, max_fruitless=1000, max_broken=1000)
    job = Job(rules=rules, agents=("a", "b"), slots=3)
    for event, number in events:
        happen(job, event, number)
        job.act()
    for agent in ("a", "b"):
        live = {
            str(w.slot): w.worker
            for w in job.roster.workers.values()
            if w.agent == agent and not w.exited
        }
        job.fold(AgentHere(agent=agent, host=agent, slots=3, pid=1, workers=live))
    for _ in range(80):
        job.pass_time(1)
        job.enter(step=job.roster.best_step + 1)
        for worker in list(job.roster.workers.values()):
            if worker.exited:
                continue
            if worker.dismissed or worker.ended is not None:
                job.exit(worker.worker, code=0)
            elif worker.worker not in job.now.members and not worker.ready:
                job.ready(worker.worker)
        job.act()

    assert len(job.now.members) == job.roster.target, job.roster
    assert job.now.go
    assert job.verdict() is None


def test_orders_travel_as_json():
    from elastane.protocol import EndAgent, EndWorker, StartWorker

    for order in (
        StartWorker(worker=1, slot=0, expected_workers=2),
        EndWorker(worker=1, grace_s=2.0),
        EndAgent(code=1),
    ):
        assert parse_order(order.to_json()) == order


def test_a_job_fails_with_the_reason_when_some_evaluate_in_the_turn_in_which_others_train():
    job = training(3)
    split = {1: "evaluate", 2: "train", 3: "evaluate"}
    for _ in range(20):
        job.pass_time(0.6, doing=split, arrived=7)
        assert job.act() is None
    verdict = job.verdict()
    assert verdict.state == "failed"
    assert "workers 1 and 3: evaluate while worker 2: train" in verdict.reason
    assert "result.crossed" in verdict.reason


def test_members_that_evaluate_one_after_the_other_are_not_at_odds():
    job = training(2)
    split = {1: "evaluate", 2: "train"}
    for _ in range(20):
        job.pass_time(0.6, doing=split, arrived={1: 6, 2: 7})
        job.act()
        assert job.verdict() is None
        job.pass_time(0.1, doing="evaluate", arrived=7)


def test_a_worker_that_is_done_may_take_its_time_before_it_exits():
    job = training(2)
    job.fold(Done(worker=1, step=9))
    job.fold(Done(worker=2, step=9))
    for _ in range(100):
        job.pass_time(1.0, silent=(1, 2))
        job.act()
    assert not [order for order in job.orders if isinstance(order, End)]
    assert job.verdict() is None


def test_a_member_that_beats_but_never_enters_is_left_behind_once_others_wait_for_it():
    job = training(2)
    job.roster = replace(job.roster, target=3)
    job.act()
    job.ready(3)
    assert job.act().members == (1, 2, 3)
    for worker in (1, 2):
        job.fold(Entered(worker=worker, generation=job.now.number, step=5, source=1))
    for _ in range(9):
        job.pass_time(1.0)
        assert job.act() is None
    job.pass_time(1.5)
    left = job.act()
    assert (left.members, left.lost, left.cause) == ((1, 2), (3,), "hang")
    assert "has not met the others" in left.reason


def test_a_member_that_never_comes_to_the_meeting_is_left_behind_by_those_who_came():
    job = training(4)
    job.exit(4)
    now = job.act().number
    came = {1: now - 1, 2: now, 3: now}
    for _ in range(9):
        job.pass_time(1.0, met=came)
        assert job.act() is None
    job.pass_time(1.5, met=came)
    left = job.act()
    assert (left.members, left.lost, left.cause) == ((2, 3), (1,), "hang")
    assert "has not met the others" in left.reason


def test_a_member_that_waits_for_a_hung_one_is_kept_whatever_newcomers_do():
    job = training(2, rules=replace(RULES, hang_limit_s=2.0))
    job.roster = replace(job.roster, target=3)
    job.ready(3)
    now = job.act().number
    came = {1: now - 1, 2: now - 1, 3: now}
    job.pass_time(0.4, met=came)
    changes = [job.act()]
    for _ in range(22):
        job.pass_time(0.1, silent=(2,), met=came)
        changes += [job.act()]
    changes = [change for change in changes if change]
    assert (changes[-1].members, changes[-1].cause) == ((1, 3), "hang")
    assert {worker for change in changes for worker in change.lost} == {2}


def test_a_member_that_said_why_it_pauses_is_waited_for_at_the_meeting():
    job = training(3)
    job.exit(3)
    now = job.act().number
    for _ in range(11):
        job.pass_time(1.0, met={1: now - 1, 2: now}, paused="compiling")
        assert job.act() is None


def test_one_that_has_reached_the_end_is_not_missed_at_a_meeting():
    job = training(3)
    job.exit(3)
    now = job.act().number
    job.fold(Done(worker=1, step=5))
    changes = []
    for _ in range(11):
        job.pass_time(1.0, met={1: now - 1, 2: now})
        changes += [job.act()]
    (again,) = filter(None, changes)
    assert (again.members, again.lost) == ((2,), ())


def test_one_that_was_behind_when_a_generation_was_published_has_its_time_to_enter():
    job = training(2)
    job.roster = replace(job.roster, target=3)
    assert job.act() is None
    behind = {1: 6, 2: 5, 3: 0}
    job.pass_time(1.0, arrived=behind)
    job.pass_time(8.5, arrived=behind)
    job.ready(3)
    assert job.act().members == (1, 2, 3)
    job.pass_time(2.0, arrived=behind)
    assert job.act() is None


def test_a_member_whose_step_broke_early_is_not_taken_for_late_at_the_meeting():
    job = training(4)
    job.exit(4)
    now = job.act().number
    known = {"met": {1: now, 2: now, 3: now - 1}, "arrived": {1: 6, 2: 5, 3: 6, 5: 0}}
    for _ in range(15):
        job.pass_time(1.0, **known, paused={3: "compiling"})
        assert job.act() is None


def test_a_newcomer_waits_while_others_enter():
    job = training(2)
    job.roster = replace(job.roster, target=4)
    job.ready(3)
    assert job.act().members == (1, 2, 3)
    job.ready(4)
    assert job.act() is None
    job.enter()
    assert job.act().members == (1, 2, 3, 4)


def test_nobody_is_absent_while_another_is_gone():
    job = training(4)
    job.exit(4)
    now = job.act().number
    came = {1: now - 1, 2: now, 3: now}
    job.pass_time(9.5, met=came)
    job.pass_time(1.0, met=came)
    job.exit(3)
    changed = job.act()
    assert (changed.members, changed.lost, changed.cause) == ((1, 2), (3,), "death")


def test_members_who_all_came_and_did_not_enter_meet_again():
    job = training(3)
    job.exit(3)
    now = job.act().number
    for _ in range(11):
        job.pass_time(1.0, met=now)
        again = job.act()
    assert (again.members, again.cause) == ((1, 2), "broken")


def test_members_of_whom_none_enters_are_told_to_meet_again():
    job = training(2)
    job.exit(2)
    assert job.act().members == (1,)
    for _ in range(11):
        job.pass_time(1.0)
        again = job.act()
    assert (again.members, again.cause) == ((1,), "broken")
    assert "nobody has entered" in again.reason
