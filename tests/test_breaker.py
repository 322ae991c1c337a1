"""Waiting for a group's operations: who lets go of what, and in which order."""

import weakref
from functools import partial
from threading import Thread

from torch.futures import Future

from elastane.peers import Breaker


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
