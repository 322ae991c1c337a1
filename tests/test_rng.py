"""Random generators: the rank that saved them gets them back, every other one its own."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch

from elastane.rng import rng_state, set_rng_state

CPU = torch.device("cpu")


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw():
    """Draw a little of everything; the Gaussians leave half a pair behind."""
    return (
        [random.random(), random.gauss(0, 1), random.randrange(10**9)],
        [np.random.rand(), np.random.randn(), int(np.random.randint(10**9))],
        torch.rand(3).tolist() + torch.randn(3).tolist() + torch.randperm(5).tolist(),
    )


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("draws", [0, 1, 2, 700])
def test_the_rank_that_saved_goes_on_to_the_bit(draws):
    seed_all(3)
    for _ in range(draws):
        draw()
    state = through_a_file(rng_state(rank=2, device=CPU))
    wanted = [draw() for _ in range(300)]
    seed_all(99)
    draw()
    set_rng_state(state, rank=2, device=CPU)
    assert [draw() for _ in range(300)] == wanted


def test_saving_draws_nothing():
    seed_all(3)
    wanted = draw()
    seed_all(3)
    rng_state(rank=0, device=CPU)
    assert draw() == wanted


def test_a_state_holds_tensors_numbers_and_strings_only():
    assert all(
        isinstance(value, (torch.Tensor, int, float, str))
        for value in rng_state(rank=0, device=CPU).values()
    )


def test_every_other_rank_gets_a_stream_of_its_own_that_is_the_same_each_time():
    seed_all(3)
    state = through_a_file(rng_state(rank=0, device=CPU))
    streams = {}
    for rank in (0, 1, 2, 3, 17):
        found = []
        for clutter in (5, 6):
            seed_all(clutter)
            set_rng_state(state, rank=rank, device=CPU)
            found.append(draw())
        assert found[0] == found[1]
        streams[rank] = found[0]
    for kind in range(3):
        assert len({tuple(stream[kind]) for stream in streams.values()}) == len(streams)


def test_a_rank_that_did_not_save_gets_another_stream_from_another_state():
    streams = []
    for seed in (3, 4):
        seed_all(seed)
        state = rng_state(rank=0, device=CPU)
        set_rng_state(state, rank=1, device=CPU)
        streams.append(draw())
    assert all(one != other for one, other in zip(*streams, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_devices_generator_goes_on_too_and_the_state_may_be_loaded_onto_the_device():
    device = torch.device("cuda")
    torch.manual_seed(3)
    buffer = io.BytesIO()
    torch.save(rng_state(rank=0, device=device), buffer)
    wanted = torch.rand(5, device=device).tolist(), torch.rand(5).tolist()
    for place in ("cpu", "cuda"):
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True, map_location=place)
        for rank in (1, 0):
            set_rng_state(state, rank=rank, device=device)
        assert (torch.rand(5, device=device).tolist(), torch.rand(5).tolist()) == wanted
