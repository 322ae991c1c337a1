"""A newcomer follows a member while the others train, and enters with next to nothing to copy."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from elastic_audit import audit
from supervisor import supervising
from torch import nn
from torch.nn import functional as F
from training import Digits

from elastane import AdamScale, GlobalBatch, Session, _env
from elastane import replay as replays
from elastane._compat import TCPStore
from elastane.elastic import following, streams
from elastane.elastic.streams import Giver, Taker, open_pair
from elastane.errors import StateError
from elastane.replay import Replay

processes = pytest.mark.processes


# Replay -----------------------------------------------------------------------------------------


def build(kind: str, *, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))
    options: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    }
    if kind == "two":
        parts = [options["sgd"](model[0].parameters()), options["adamw"](model[2].parameters())]
        return model, parts
    return model, options[kind](model.parameters())


def session_of(model: nn.Module, optimizer: Any, **options: Any) -> Session:
    return Session(
        model,
        optimizer=optimizer,
        dataset=Digits(),
        base_batch_size=8,
        num_steps=1e6,
        rule=AdamScale(),
        batch=GlobalBatch(16, micro_batches=2),
        progress_bar=False,
        **options,
    )


def replay_of(session: Session) -> Replay:
    return session._parts.training.replay()


def bits_of(session: Session) -> list[int]:
    one = replay_of(session)
    return [number for part in one.parts() for number in one.sums(part)]


def steps(session: Session, count: int) -> None:
    for images, labels, _ in session:
        session.backward(F.cross_entropy(session.model(images), labels))
        if session.step() is not None:
            count -= 1
            if count == 0:
                return


@pytest.mark.parametrize("kind", ["sgd", "adamw", "rmsprop", "two"])
def test_a_follower_has_the_same_bits_part_by_part_and_step_by_step(kind, monkeypatch):
    monkeypatch.setattr(replays, "_PART_BYTES", 1)
    ours, theirs = (session_of(*build(kind, seed=seed)) for seed in (0, 1))
    shown, follower, count = replay_of(ours), replay_of(theirs), 0
    parts = shown.parts()
    assert [list(part) for part in parts] == [[0], [1], [2], [3]]
    with ours, theirs:
        steps(ours, 3)
        shown.watch(lambda factors: follower.take_step(shown.step(count, factors)))
        for part in parts:
            steps(ours, 2)
            follower.take_part(shown.part(part))
            count = part.stop
        steps(ours, 3)
        shown.watch(None)
    assert bits_of(theirs) == bits_of(ours)


def test_frozen_parameters_are_followed_as_they_are():
    ours, theirs = (session_of(*build("adamw", seed=seed)) for seed in (0, 1))
    for session in (ours, theirs):
        next(session.model.parameters()).requires_grad_(False)
    shown, follower = replay_of(ours), replay_of(theirs)
    with ours, theirs:
        steps(ours, 1)
        (part,) = shown.parts()
        follower.take_part(shown.part(part))
        shown.watch(lambda factors: follower.take_step(shown.step(part.stop, factors)))
        steps(ours, 3)
    assert bits_of(theirs) == bits_of(ours)


def test_sums_tell_a_single_bit():
    session = session_of(*build("sgd", seed=0))
    before = bits_of(session)
    with torch.no_grad():
        weight = next(session.model.parameters())
        weight.view(-1)[5] = torch.nextafter(weight.view(-1)[5], torch.tensor(10.0))
    assert bits_of(session) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 33])
def test_sums_do_not_depend_on_where_a_tensor_lies(dtype, size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).mul(50).to(dtype)
    wanted = replays._sum_of_bits(values)
    for shift in (1, 2, 3, 4):
        shifted = torch.zeros(size + shift, dtype=dtype)[shift:].copy_(values)
        assert replays._sum_of_bits(shifted) == wanted
    for place in range(size):
        other = values.clone()
        other[place] += 1
        assert replays._sum_of_bits(other) != wanted


def test_the_memory_of_a_step_that_is_sent_is_used_again():
    session = session_of(*build("sgd", seed=0))
    shown = replay_of(session)
    for parameter in session.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    first = shown.step(4, [1.0])
    places = [one.data_ptr() for one in first["gradients"]]
    assert [one.data_ptr() for one in shown.step(4, [1.0])["gradients"]] != places
    shown.have_back(first)
    again = shown.step(4, [1.0])
    assert [one.data_ptr() for one in again["gradients"]] == places
    for parameter, gradient in zip(session.model.parameters(), again["gradients"], strict=True):
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)


def test_what_does_not_follow_from_gradients_is_not_followed():
    model, optimizer = build("adamw", seed=0)
    assert replay_of(session_of(model, optimizer)).is_possible
    model, optimizer = build("adamw", seed=0)
    scaler = torch.amp.GradScaler("cpu")
    assert not replay_of(session_of(model, optimizer, scaler=scaler)).is_possible


def test_who_follows_is_said_in_megabytes(monkeypatch):
    monkeypatch.delenv("ELASTANE_FOLLOW_MB", raising=False)
    assert _env.follow_bytes() == 64 * 2**20
    for given, wanted in (("16", 16 * 2**20), ("", 64 * 2**20), ("inf", float("inf"))):
        monkeypatch.setenv("ELASTANE_FOLLOW_MB", given)
        assert _env.follow_bytes() == wanted
    monkeypatch.setenv("ELASTANE_FOLLOW_MB", "large")
    with pytest.raises(ValueError, match=r"ELASTANE_FOLLOW_MB='large' must be a number"):
        _env.follow_bytes()


# Streams ----------------------------------------------------------------------------------------


class Tape:
    """A training of a single number, which each step triples, modulo a prime."""

    is_possible = True
    num_bytes = 4

    def __init__(self, value: float) -> None:
        self.value = torch.tensor([value])
        self.returned: list[float] = []

    def parts(self):
        return [range(0, 1)]

    def watch(self, _on_step):
        pass

    def part(self, _some):
        return {"value": self.value.clone()}

    def take_part(self, tree):
        self.value = tree["value"]

    def step(self, _count, _buffer_factors):
        return {"factor": 3.0}

    def have_back(self, step):
        self.returned.append(step["factor"])

    def take_step(self, tree):
        self.value = self.value * tree["factor"] % 1009

    def sums(self, _some):
        return [int(self.value)]


@pytest.fixture
def supervisor(tmp_path):
    with supervising(tmp_path) as one:
        yield one


@pytest.fixture
def connect():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, numbers = store.port, iter(range(100))

    def pair():
        prefix = f"streams/{next(numbers)}"
        return [
            lambda rank=rank: open_pair(
                TCPStore("127.0.0.1", port, wait_for_workers=False), prefix=prefix, rank=rank
            )
            for rank in (0, 1)
        ]

    yield pair
    del store


def advance(ours: Tape, giver: Giver) -> None:
    giver.step([1.0])
    ours.value = ours.value * 3 % 1009
    giver.advance()


def test_a_stream_ends_where_the_member_stands(connect):
    ours, theirs = Tape(3.0), Tape(0.0)
    first, second = connect()
    giver = Giver(ours, newcomer=7, connect=first)
    taker = Taker(theirs, connect=second)
    while not taker.wait_ready(0.01):
        advance(ours, giver)
    assert taker.failure is None
    advance(ours, giver)
    giver.end(41)
    assert taker.wait_over(20)
    assert (taker.turns, taker.failure) == (41, None)
    assert torch.equal(theirs.value, ours.value)
    assert set(ours.returned) == {3.0}


def test_a_change_outside_of_steps_is_found_out(connect):
    ours, theirs = Tape(3.0), Tape(0.0)
    first, second = connect()
    giver = Giver(ours, newcomer=7, connect=first)
    taker = Taker(theirs, connect=second)
    while not taker.wait_ready(0.01):
        advance(ours, giver)
        ours.value = ours.value + 1
    assert taker.wait_over(20)
    assert "differ from those of the worker" in (taker.failure or "")
    assert taker.turns == -1


def test_a_newcomer_that_takes_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(streams, "MOST_WAITING", 3)
    ours = Tape(3.0)
    stuck = threading.Event()
    monkeypatch.setattr(streams, "send_state", lambda *_, **__: stuck.wait(20))
    giver = Giver(ours, newcomer=7, connect=lambda: object())
    while not giver.is_over:
        advance(ours, giver)
    stuck.set()


def test_a_newcomer_whose_member_is_gone_is_ready_for_the_whole_state():
    def fail():
        raise StateError("nobody is there")

    taker = Taker(Tape(0.0), connect=fail)
    assert taker.wait_ready(20)
    assert (taker.turns, taker.failure, taker.has_begun) == (-1, "nobody is there", False)


def test_a_newcomer_that_has_given_up_is_left_alone(connect):
    ours, theirs = Tape(3.0), Tape(0.0)
    first, second = connect()
    giver = Giver(ours, newcomer=7, connect=first)
    taker = Taker(theirs, connect=second)
    taker.give_up()
    while not taker.wait_over(0.01):
        advance(ours, giver)
    assert (taker.has_begun, taker.turns, float(theirs.value)) == (False, -1, 0.0)


def test_a_newcomer_does_not_wait_long_for_a_member_that_says_nothing(connect, monkeypatch):
    ours, theirs = Tape(3.0), Tape(0.0)
    first, second = connect()
    giver = Giver(ours, newcomer=7, connect=first)
    one = following.Following(worker=7, connect=TCPStore)
    one._taker = Taker(theirs, connect=second)
    while not one.has_begun:
        advance(ours, giver)
        time.sleep(0.005)
    monkeypatch.setattr(following, "_SILENCE_LIMIT_S", 0.1)
    assert one.finish(is_broken=lambda: False) == -1
    giver.end(3)  # too late
    assert one._taker.wait_over(20)
    assert one.turns == -1
    one.close()


def test_ends_that_are_closed_wait_for_nobody(connect):
    ours, theirs = Tape(3.0), Tape(0.0)
    first, second = connect()
    giver = Giver(ours, newcomer=7, connect=first)
    taker = Taker(theirs, connect=second)
    while not taker.has_begun:
        advance(ours, giver)
        time.sleep(0.005)
    taker.close()  # its member says nothing more
    assert taker.wait_over(0)
    giver.close()
    assert giver.is_over
    assert not giver._thread.is_alive()
    assert not taker._thread.is_alive()


# Jobs -------------------------------------------------------------------------------------------


def place_of(supervisor, worker: int) -> dict[str, Any]:
    return next(r for r in supervisor.all_records("generation") if r["worker"] == worker)


@processes
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd", "schedule": "cosine"},
        {"optimizer": "adam", "batch_norm": True, "average_decay": 0.99},
        {"optimizer": "adam", "batch": "grid", "evaluate_every": 9},
    ],
    ids=["sgd", "adam", "evaluations"],
)
def test_a_newcomer_enters_in_the_same_state_without_a_copy_of_it(supervisor, options):
    if "evaluate_every" in options:
        supervisor.open_gate("evaluation")
    options = {"follows": True, "step_s": 0.005, **options}
    supervisor.begin(1, 2, **options)
    supervisor.let_train(1)
    supervisor.start(3, **options)
    supervisor.change(1, 2, 3)
    supervisor.let_train(1, 3)
    supervisor.finish()
    audit(supervisor)
    assert place_of(supervisor, 3)["has_followed"]
    assert not place_of(supervisor, 2)["has_followed"]


@processes
def test_the_death_of_the_member_that_is_followed_costs_a_copy(supervisor):
    options = {"follows": True, "step_s": 0.005}
    supervisor.begin(1, 2, **options)
    supervisor.start(3, **options)
    supervisor.wait_ready(3)
    supervisor.kill(1)
    supervisor.change(2, 3, cause="died")
    supervisor.let_train(2, 3)
    supervisor.finish()
    audit(supervisor)
    assert not place_of(supervisor, 3)["has_followed"]


@processes
def test_another_members_death_on_the_way_does_no_harm(supervisor):
    options = {"follows": True, "step_s": 0.005}
    supervisor.begin(1, 2, 3, **options)
    supervisor.start(4, **options)
    supervisor.wait_ready(4)
    supervisor.kill(3)
    supervisor.change(1, 2, cause="died")
    supervisor.let_train(1)
    supervisor.change(1, 2, 4)
    supervisor.let_train(1, 4)
    supervisor.finish()
    audit(supervisor)
    assert place_of(supervisor, 4)["has_followed"]


@processes
def test_weights_that_change_outside_of_the_optimizer_are_copied(supervisor):
    options = {"follows": True, "clamps": True, "step_s": 0.005}
    supervisor.begin(1, 2, **options)
    supervisor.start(3, **options)
    supervisor.change(1, 2, 3)
    supervisor.let_train(1, 3)
    supervisor.finish()
    audit(supervisor)
    assert not place_of(supervisor, 3)["has_followed"]


@processes
def test_a_newcomer_that_stands_still_on_the_way_holds_nobody_up(supervisor):
    options = {"follows": True, "step_s": 0.005}
    supervisor.begin(1, 2, **options)
    supervisor.start(3, **options)
    supervisor.wait_ready(3)
    pid = supervisor.processes[3].pid
    os.kill(pid, signal.SIGSTOP)
    supervisor.let_train(1, 2, steps=60)
    os.kill(pid, signal.SIGCONT)
    supervisor.change(1, 2, 3)
    supervisor.let_train(1, 3)
    supervisor.finish()
    audit(supervisor)
