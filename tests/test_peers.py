"""Waiting for a group: what comes of it, that nobody waits for ever, and who lets go of what."""

from __future__ import annotations

import time
import weakref
from functools import partial
from threading import Event, Thread, Timer

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future
from workers import run_workers

from elastane.errors import CommunicationError
from elastane.peers import Breaker, Peers


def raising(error):
    def action():
        raise error

    return action


def test_an_action_returns_what_it_returns():
    assert Breaker().call(lambda: 3) == 3


@pytest.mark.timeout(20)
@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("gone")], ids=repr)
def test_a_failure_of_the_connection_is_a_communication_error(error):
    with pytest.raises(CommunicationError, match="gone"):
        Breaker().call(raising(error))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("error", [ValueError("wrong"), TypeError("wrong")], ids=repr)
def test_a_mistake_is_raised_as_it_is_and_keeps_nobody_waiting(error):
    with pytest.raises(type(error), match="wrong"):
        Breaker().call(raising(error))


@pytest.mark.timeout(20)
def test_what_was_given_up_is_not_begun():
    breaker = Breaker()
    breaker.give_up("a peer died")
    with pytest.raises(CommunicationError, match="a peer died"):
        breaker.call(raising(AssertionError))


@pytest.mark.timeout(20)
def test_a_group_is_let_go_of_after_gloos_threads_have_come_back():
    breaker, work = Breaker(), Work()
    may_return, events = Event(), []

    def then(_why):
        may_return.wait()
        events.append("result")

    breaker.watch(work, then, on_host=True)
    ending = Thread(target=work.future.set_result, args=(None,))
    ending.start()
    Timer(0.1, may_return.set).start()
    while breaker._num_ending == 0:
        time.sleep(0.001)
    breaker.await_returns()
    assert events == ["result"]
    ending.join()
    breaker.await_returns()


class Work:
    """An operation that ends when its future does."""

    def __init__(self):
        self.future = Future()

    def get_future(self):
        return self.future


class Held:
    """Stands for what refers to a group."""

    def told(self, why):
        return why


def test_the_groups_own_thread_lets_go_of_the_group_before_who_waits_goes_on():
    work, held = Work(), Held()
    alive = weakref.ref(held)
    ended = Breaker().watch(work, partial(Held.told, held), on_host=True)
    is_alive = ended.then(lambda _: alive() is not None)
    del held

    Thread(target=work.future.set_result, args=(None,)).start()

    assert is_alive.wait() is False
    assert ended.value() is None


def some_tensors(rank):
    """Return tensors of several kinds: large, small, of two dtypes, empty, a transposed view."""
    torch.manual_seed(rank)
    small = [torch.randn(3, 2), torch.randn(5).double(), torch.empty(0, 4), torch.randn(2, 7).t()]
    return [torch.randn(600, 500), *small, torch.randn(500, 600).t()]


def sum_of_all():
    tensors = some_tensors(dist.get_rank())
    Peers(dist.group.WORLD).sum_all(tensors)
    return tensors


@pytest.mark.processes
def test_tensors_of_any_size_and_form_are_added_up_in_place(tmp_path):
    wanted = [a + b for a, b in zip(some_tensors(0), some_tensors(1), strict=True)]
    for found in run_workers(sum_of_all, world_size=2, folder=tmp_path):
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
