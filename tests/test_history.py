"""What a worker makes of the generations that it has heard of."""

from elastane.elastic.history import History
from elastane.protocol import Generation


def after(*generations):
    history = History()
    for generation in generations:
        history = history.after(generation)
    return history


def test_a_member_that_was_lost_and_is_back_breaks_the_group_that_it_was_in():
    first, lost = (
        Generation(number=1, members=(1, 2)),
        Generation(number=2, members=(1,), lost=(2,)),
    )
    history = after(first, lost, Generation(number=3, members=(1, 2)))

    assert history.is_broken((1, 2), since=1)
    assert not history.is_broken((1, 2), since=3)


def test_members_that_left_as_agreed_break_no_group_however_long_ago_that_was():
    left = Generation(number=2, members=(1, 2), dismissed=(3,))
    history = after(
        Generation(number=1, members=(1, 2, 3)), left, Generation(number=3, members=(1, 2))
    )

    assert not history.is_broken((1, 2, 3), since=1)
    assert history.is_broken((1, 2, 3, 4), since=1)


def test_all_meet_again_after_a_group_that_broke_without_a_death():
    broken = Generation(number=2, members=(1, 2), cause="broken")
    history = after(Generation(number=1, members=(1, 2)), broken)

    assert history.is_broken((1, 2), since=1)
    assert not history.is_broken((1, 2), since=2)


def test_what_was_heard_already_changes_nothing():
    history = after(Generation(number=2, members=(1, 2)))

    assert history.after(Generation(number=2, members=(1,))) is history
    assert history.after(Generation(number=1, members=(1,))) is history
