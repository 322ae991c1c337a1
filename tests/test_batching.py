"""Batch policies: every sample of every batch once, whoever takes part."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from elastane import order
from elastane.batching import GlobalBatch, LocalBatch, World
from elastane.errors import ArgumentError
from elastane.planning import MicroBatch, plan_step

always = partial(settings, derandomize=True, deadline=None, database=None)

worlds = st.integers(1, 7)
sizes = st.integers(1, 40)
min_samples = st.integers(1, 2)

local = st.builds(
    lambda samples, parts: LocalBatch(samples, micro_batches=min(parts, samples)),
    sizes,
    st.integers(1, 5),
)
even = st.builds(
    partial(GlobalBatch, allow_idle_workers=True),
    sizes,
    max_micro_batch=st.none() | st.integers(1, 20),
)
grid = st.builds(
    lambda samples, parts: GlobalBatch(
        samples, micro_batches=min(parts, samples), allow_idle_workers=True
    ),
    sizes,
    st.integers(1, 9),
)
policies = st.one_of(local, even, grid)


def plans(policy, *, world_size, **options):
    """Return each rank's plan of one step."""
    return [
        plan_step(policy, world=World(rank=rank, world_size=world_size), **options)
        for rank in range(world_size)
    ]


def ranges(plan):
    return [(m.start, m.stop) for m in plan.micro_batches if m.weight]


def sizes_of(plan):
    return [m.stop - m.start for m in plan.micro_batches]


def steps(policy, *, world_size, num_samples, num_epochs=1, position=0, **options):
    """Yield each step's plans until the epochs are over."""
    while position < num_epochs * num_samples:
        dealt = plans(
            policy, world_size=world_size, position=position, num_samples=num_samples, **options
        )
        yield dealt
        position = dealt[0].stop


# All policies


@always(max_examples=400)
@given(
    policy=policies,
    world_size=worlds,
    num_samples=st.integers(1, 300),
    position=st.integers(0, 900),
    min_samples=min_samples,
    straddle=st.booleans(),
)
def test_the_workers_micro_batches_are_the_batch_exactly_once(
    policy, world_size, num_samples, position, min_samples, straddle
):
    dealt = plans(
        policy,
        world_size=world_size,
        position=position,
        num_samples=num_samples,
        min_samples=min_samples,
        straddle=straddle,
    )
    assert len({(plan.start, plan.stop, plan.nominal_samples) for plan in dealt}) == 1
    plan = dealt[0]
    assert plan.start == position < plan.stop
    assert plan.nominal_samples == policy.batch_samples(world_size)
    seen = [place for one in dealt for a, b in ranges(one) for place in range(a, b)]
    assert seen == list(range(plan.start, plan.stop))
    assert sum(m.weight for one in dealt for m in one.micro_batches) == plan.batch_samples
    for one in dealt:
        assert one.micro_batches
        for micro_batch in one.micro_batches:
            assert plan.start <= micro_batch.start < micro_batch.stop <= plan.stop
            assert micro_batch.weight in (0, micro_batch.stop - micro_batch.start)
    if straddle:
        assert plan.batch_samples == plan.nominal_samples
    else:
        assert plan.start // num_samples == (plan.stop - 1) // num_samples


@always(max_examples=200)
@given(policy=policies, world_size=worlds, num_samples=st.integers(1, 200), least=min_samples)
def test_epochs_are_covered_and_tails_that_are_too_small_joined(
    policy, world_size, num_samples, least
):
    nominal = policy.batch_samples(world_size)
    batches = [
        (dealt[0].start, dealt[0].stop)
        for dealt in steps(
            policy,
            world_size=world_size,
            num_samples=num_samples,
            num_epochs=2,
            min_samples=least,
        )
    ]
    assert batches[0][0] == 0
    assert batches[-1][1] == 2 * num_samples
    assert all(before[1] == after[0] for before, after in pairwise(batches))
    for start, stop in batches:
        assert stop - start < 2 * nominal
        if stop % num_samples:
            assert stop - start == nominal


@always(max_examples=300)
@given(
    samples=sizes,
    kind=st.sampled_from(["local", "even", "capped"]),
    world_size=worlds,
    num_samples=st.integers(2, 300),
    micro_batches=st.integers(1, 5),
    limit=st.integers(1, 9),
)
@example(samples=5, kind="local", world_size=2, num_samples=21, micro_batches=1, limit=1)
def test_batch_statistics_never_see_a_single_sample(
    samples, kind, world_size, num_samples, micro_batches, limit
):
    policy = {
        "local": LocalBatch(samples, micro_batches=min(micro_batches, samples)),
        "even": GlobalBatch(samples, allow_idle_workers=True),
        "capped": GlobalBatch(samples, max_micro_batch=limit, allow_idle_workers=True),
    }[kind]
    assume(samples >= 2)
    for dealt in steps(policy, world_size=world_size, num_samples=num_samples, min_samples=2):
        for plan in dealt:
            assert min(sizes_of(plan)) >= 2


@always(max_examples=300)
@given(
    policy=policies,
    sizes_of_world=st.lists(worlds, min_size=2, max_size=6),
    num_samples=st.integers(14, 120),
)
def test_a_change_of_workers_in_an_epoch_leaves_no_single_sample_behind(
    policy, sizes_of_world, num_samples
):
    """What an earlier, smaller world left over goes to fewer workers."""
    assume(all(policy.batch_samples(size) >= 2 * size for size in sizes_of_world))
    position, worlds_left = 0, list(sizes_of_world)
    while position < num_samples:
        world_size = worlds_left.pop(0) if len(worlds_left) > 1 else worlds_left[0]
        dealt = plans(
            policy,
            world_size=world_size,
            position=position,
            num_samples=num_samples,
            min_samples=2,
        )
        assert min(size for plan in dealt for size in sizes_of(plan)) >= 2
        seen = [place for plan in dealt for a, b in ranges(plan) for place in range(a, b)]
        assert seen == list(range(position, dealt[0].stop))
        position = dealt[0].stop


@always(max_examples=200)
@given(
    policy=st.one_of(local, even),
    world_size=worlds,
    num_samples=st.integers(1, 300),
    least=min_samples,
)
def test_no_worker_is_idle_while_there_are_samples_for_all(policy, world_size, num_samples, least):
    assume(policy.batch_samples(world_size) >= least * world_size <= num_samples)
    for dealt in steps(policy, world_size=world_size, num_samples=num_samples, min_samples=least):
        assert all(m.weight for plan in dealt for m in plan.micro_batches)


@always(max_examples=100)
@given(
    policy=policies,
    world_size=worlds,
    num_samples=st.integers(1, 100),
    position=st.integers(0, 300),
)
def test_straddling_batches_are_all_of_the_same_size(policy, world_size, num_samples, position):
    nominal = policy.batch_samples(world_size)
    for _ in range(4):
        (plan, *_) = plans(
            policy,
            world_size=world_size,
            position=position,
            num_samples=num_samples,
            straddle=True,
        )
        assert (plan.start, plan.stop) == (position, position + nominal)
        position = plan.stop


# LocalBatch


def test_a_local_batch_grows_with_the_workers():
    policy = LocalBatch(8, micro_batches=2)
    assert [policy.batch_samples(size) for size in (1, 2, 5)] == [8, 16, 40]
    first, second = plans(policy, world_size=2, position=100, num_samples=1000)
    assert ranges(first) == [(100, 104), (104, 108)]
    assert ranges(second) == [(108, 112), (112, 116)]
    assert (first.batch_samples, first.nominal_samples) == (16, 16)


# BC-43
@pytest.mark.parametrize(
    ("num_samples", "wanted"),
    [
        (22, [[(0, 5), (5, 10)], [(10, 15), (15, 20)], [(20, 21), (21, 22)]]),
        (21, [[(0, 5), (5, 10)], [(10, 16), (16, 21)]]),
        (27, [[(0, 5), (5, 10)], [(10, 15), (15, 20)], [(20, 24), (24, 27)]]),
    ],
)
def test_an_uneven_tail_is_split_or_joined(num_samples, wanted):
    found = [
        [ranges(plan)[0] for plan in dealt]
        for dealt in steps(LocalBatch(5), world_size=2, num_samples=num_samples)
    ]
    assert found == wanted


def test_a_tail_of_which_a_worker_would_get_a_single_sample_is_joined_for_batch_statistics():
    for num_samples, wanted in ((24, [10, 10, 4]), (23, [10, 13])):
        found = [
            dealt[0].batch_samples
            for dealt in steps(LocalBatch(5), world_size=2, num_samples=num_samples, min_samples=2)
        ]
        assert found == wanted


def test_micro_batches_of_a_short_tail_are_fewer():
    (plan,) = plans(
        LocalBatch(8, micro_batches=4), world_size=1, position=8, num_samples=11, min_samples=2
    )
    assert ranges(plan) == [(8, 11)]


def test_the_nominal_batch_is_what_the_policy_asks_for_where_the_batch_is_another():
    (plan,) = plans(LocalBatch(8), world_size=1, position=8, num_samples=11)
    assert (plan.batch_samples, plan.nominal_samples) == (3, 8)


# GlobalBatch


# BC-43
def test_a_global_batch_stays_and_is_split_as_evenly_as_it_goes():
    dealt = plans(GlobalBatch(16), world_size=3, position=0, num_samples=100)
    assert [ranges(plan) for plan in dealt] == [[(0, 6)], [(6, 11)], [(11, 16)]]


def test_a_worker_accumulates_where_its_memory_ends():
    policy = GlobalBatch(22, max_micro_batch=4)
    dealt = plans(policy, world_size=2, position=0, num_samples=100)
    assert [sizes_of(plan) for plan in dealt] == [[4, 4, 3], [4, 4, 3]]
    (alone,) = plans(policy, world_size=1, position=0, num_samples=100)
    assert sizes_of(alone) == [4, 4, 4, 4, 3, 3]


@always(max_examples=150)
@given(samples=sizes, limit=st.integers(1, 9), world_size=worlds, num_samples=st.integers(7, 300))
def test_no_micro_batch_is_larger_than_the_limit(samples, limit, world_size, num_samples):
    policy = GlobalBatch(samples, max_micro_batch=limit, allow_idle_workers=True)
    for dealt in steps(policy, world_size=world_size, num_samples=num_samples):
        for plan in dealt:
            assert max(sizes_of(plan)) <= limit
            assert max(sizes_of(plan)) - min(sizes_of(plan)) <= 1


@always(max_examples=200)
@given(
    samples=sizes,
    micro_batches=st.integers(1, 9),
    num_samples=st.integers(7, 300),
    least=min_samples,
    straddle=st.booleans(),
)
def test_a_fixed_grid_does_not_depend_on_the_number_of_workers(
    samples, micro_batches, num_samples, least, straddle
):
    assume(micro_batches <= samples)
    policy = GlobalBatch(samples, micro_batches=micro_batches, allow_idle_workers=True)

    def boundaries(world_size):
        return [
            sorted(place for plan in dealt for place in ranges(plan))
            for dealt in steps(
                policy,
                world_size=world_size,
                num_samples=num_samples,
                min_samples=least,
                straddle=straddle,
            )
        ]

    alone = boundaries(1)
    assert all(boundaries(size) == alone for size in (2, 3, 5, 7))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_fixed_grid_is_dealt_whole(world_size):
    dealt = plans(
        GlobalBatch(10, micro_batches=4), world_size=world_size, position=0, num_samples=100
    )
    assert [one for plan in dealt for one in ranges(plan)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    counts = [len(plan.micro_batches) for plan in dealt]
    assert max(counts) - min(counts) <= 1


@always(max_examples=200)
@given(
    samples=st.integers(1, 60),
    micro_batches=st.integers(1, 9),
    world_size=worlds,
    num_samples=st.integers(20, 300),
    least=min_samples,
)
def test_a_grid_of_at_least_as_many_micro_batches_as_workers_leaves_none_idle(
    samples, micro_batches, world_size, num_samples, least
):
    assume(world_size <= micro_batches <= samples // least <= num_samples // least)
    policy = GlobalBatch(samples, micro_batches=micro_batches)
    for dealt in steps(policy, world_size=world_size, num_samples=num_samples, min_samples=least):
        assert all(m.weight >= least for plan in dealt for m in plan.micro_batches)


def test_shares_are_dealt_in_proportion():
    three, one = plans(GlobalBatch(16, shares=(3, 1)), world_size=2, position=0, num_samples=100)
    assert ranges(three) == [(0, 12)]
    assert ranges(one) == [(12, 16)]


def test_shares_of_a_grid_are_whole_micro_batches():
    policy = GlobalBatch(16, micro_batches=4, shares=(3, 1))
    three, one = plans(policy, world_size=2, position=0, num_samples=100)
    assert ranges(three) == [(0, 4), (4, 8), (8, 12)]
    assert ranges(one) == [(12, 16)]


@always(max_examples=150)
@given(
    samples=st.integers(8, 60),
    shares=st.lists(st.floats(0.5, 2.0), min_size=1, max_size=5),
    num_samples=st.integers(20, 300),
    limit=st.none() | st.integers(1, 9),
)
def test_uneven_shares_are_the_batch_exactly_once_too(samples, shares, num_samples, limit):
    policy = GlobalBatch(samples, shares=shares, max_micro_batch=limit)
    for dealt in steps(policy, world_size=len(shares), num_samples=num_samples):
        seen = [place for plan in dealt for a, b in ranges(plan) for place in range(a, b)]
        assert seen == list(range(dealt[0].start, dealt[0].stop))


# Idle workers


def test_idle_workers_take_part_with_a_repeated_sample_of_no_weight():
    policy = GlobalBatch(2, allow_idle_workers=True)
    dealt = plans(policy, world_size=4, position=10, num_samples=100)
    assert [plan.micro_batches for plan in dealt] == [
        (MicroBatch(start=10, stop=11, weight=1),),
        (MicroBatch(start=11, stop=12, weight=1),),
        (MicroBatch(start=10, stop=11, weight=0),),
        (MicroBatch(start=10, stop=11, weight=0),),
    ]


def test_workers_are_left_idle_before_batch_statistics_see_a_single_sample():
    policy = GlobalBatch(5, allow_idle_workers=True)
    dealt = plans(policy, world_size=3, position=10, num_samples=100, min_samples=2)
    assert [[(m.start, m.stop, m.weight) for m in plan.micro_batches] for plan in dealt] == [
        [(10, 13, 3)],
        [(13, 15, 2)],
        [(10, 12, 0)],
    ]


def test_idle_workers_of_a_model_with_batch_statistics_see_two_samples():
    policy = GlobalBatch(4, micro_batches=2, allow_idle_workers=True)
    dealt = plans(policy, world_size=3, position=10, num_samples=100, min_samples=2)
    assert [sizes_of(plan) for plan in dealt] == [[2], [2], [2]]
    assert [plan.micro_batches[0].weight for plan in dealt] == [2, 2, 0]


def test_fewer_samples_than_workers_are_refused_unless_idle_workers_are_allowed():
    with pytest.raises(ArgumentError, match=r"samples=3: fewer than the 4 workers.*idle"):
        plans(GlobalBatch(3), world_size=4, position=0, num_samples=100)
    assert plans(GlobalBatch(3), world_size=3, position=0, num_samples=100)


def test_fewer_micro_batches_than_workers_are_refused_unless_idle_workers_are_allowed():
    policy = GlobalBatch(64, micro_batches=3)
    with pytest.raises(ArgumentError, match="micro_batches=3: fewer than the 4 workers"):
        plans(policy, world_size=4, position=0, num_samples=100)


def test_a_share_too_small_for_a_sample_is_refused_unless_idle_workers_are_allowed():
    with pytest.raises(ArgumentError, match="shares"):
        plans(GlobalBatch(16, shares=(100, 1)), world_size=2, position=0, num_samples=100)
    policy = GlobalBatch(16, shares=(100, 1), allow_idle_workers=True)
    _, idle = plans(policy, world_size=2, position=0, num_samples=100)
    assert idle.micro_batches == (MicroBatch(start=0, stop=1, weight=0),)


# Errors


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: LocalBatch(0), "samples=0"),
        (lambda: LocalBatch(2.0), "samples=2.0"),
        (lambda: LocalBatch(True), "samples=True"),
        (lambda: LocalBatch(4, micro_batches=0), "micro_batches=0"),
        (lambda: LocalBatch(4, micro_batches=5), "more than the 4 samples"),
        (lambda: GlobalBatch(0), "samples=0"),
        (lambda: GlobalBatch(4, micro_batches=5), "more than the 4 samples"),
        (lambda: GlobalBatch(4, max_micro_batch=0), "max_micro_batch=0"),
        (lambda: GlobalBatch(4, micro_batches=2, max_micro_batch=2), "can't be combined"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(make, match):
    with pytest.raises(ArgumentError, match=match):
        make()


@pytest.mark.parametrize("shares", [(1,), (1, 2, 3), (1, 0), (1, -1), (1, float("inf"))])
def test_shares_that_fit_no_workers_are_refused(shares):
    with pytest.raises(ArgumentError, match="shares"):
        plans(GlobalBatch(16, shares=shares), world_size=2, position=0, num_samples=100)


def test_the_steps_of_an_epoch_together_are_the_epoch_of_the_order():
    dealt = steps(LocalBatch(5, micro_batches=2), world_size=3, num_samples=53, num_epochs=2)
    indices = [
        index
        for step in dealt
        for plan in step
        for start, stop in ranges(plan)
        for index in order.stream_indices(start, stop, num_samples=53, seed=4).tolist()
    ]
    assert sorted(indices[:53]) == sorted(indices[53:]) == list(range(53))


# BC-50
def test_an_epoch_ends_exactly_and_the_next_one_is_whole_with_six_workers():
    # dlrover PR #1553: 60,000 samples, 56,800 done, then 6 workers; the next epoch must be whole.
    position, seen = 56_800, []
    while position < 120_000:
        plans = [
            plan_step(
                LocalBatch(100),
                position=position,
                num_samples=60_000,
                world=World(rank=rank, world_size=6),
            )
            for rank in range(6)
        ]
        for plan in plans:
            for part in plan.micro_batches:
                seen += range(part.start, part.stop)
        position = plans[0].stop
    assert seen == list(range(56_800, 120_000))


def test_a_share_too_small_for_batch_norm_is_refused_on_every_worker_and_a_tail_is_cut_evenly():
    policy = GlobalBatch(10, shares=(9, 1))
    for rank in range(2):
        with pytest.raises(ArgumentError, match="shares="):
            plan_step(
                policy,
                position=0,
                num_samples=100,
                world=World(rank=rank, world_size=2),
                min_samples=2,
            )
    policy, sizes = GlobalBatch(20, shares=(8, 2)), []
    for rank in range(2):
        world = World(rank=rank, world_size=2)
        plan = plan_step(policy, position=20, num_samples=26, world=world, min_samples=2)
        sizes.append(sum(part.weight for part in plan.micro_batches))
    assert sizes == [3, 3]
