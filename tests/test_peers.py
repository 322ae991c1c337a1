"""Blocking actions of a group: what they return, and that nobody waits for one that failed."""

from __future__ import annotations

import pytest

from elastane.errors import CommunicationError
from elastane.peers import Breaker


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
