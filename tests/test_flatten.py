"""State trees taken apart and put together again."""

import json
import math
import struct
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop, lr_scheduler

from elastane.elastic.flatten import flatten_state, unflatten_state
from elastane.errors import StateError, UnsupportedError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def bits(value):
    """A value that is equal for equal bits, types and order, and for nothing else."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().resolve_conj().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ("tensor", value.dtype, tuple(value.shape), raw)
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    if isinstance(value, dict):
        return (type(value), [(bits(key), bits(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [bits(item) for item in value])
    return (type(value), value)


def there_and_back(tree):
    flat = flatten_state(tree)
    json.loads(flat.skeleton, parse_constant=pytest.fail)
    assert len(flat.names) == len(set(flat.names)) == len(flat.tensors)
    return unflatten_state(flat.skeleton, flat.tensors)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 2
    return values.to(draw(st.sampled_from(DTYPES)))


any_text = st.text(st.characters(exclude_categories=[]))
keys = any_text | st.integers()
scalars = st.none() | st.booleans() | st.integers() | st.floats() | any_text
trees = st.recursive(
    scalars | tensors(),
    lambda parts: (
        st.lists(parts, max_size=4)
        | st.lists(parts, max_size=4).map(tuple)
        | st.dictionaries(keys, parts, max_size=4)
        | st.dictionaries(keys, parts, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=20,
)


@given(trees)
def test_a_tree_comes_back_to_the_bit(tree):
    assert bits(there_and_back(tree)) == bits(tree)


def test_numbers_come_back_with_sign_payload_and_length():
    odd_nan = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    tree = [-0.0, math.inf, -math.inf, odd_nan, 5e-324, 0.1, 2**63, -(2**9000), 1, True]
    assert bits(there_and_back(tree)) == bits(tree)


def test_two_lone_surrogates_stay_two():
    assert there_and_back(["\ud800\udc00", {"\ud800\udc00": 1}]) == [
        "\ud800\udc00",
        {"\ud800\udc00": 1},
    ]


def test_a_numpy_float_comes_back_as_a_plain_float():
    (lr,) = there_and_back([np.float64(0.1)])
    assert type(lr) is float
    assert lr == 0.1


def test_the_tensors_are_the_trees_own_but_detached():
    parameter = torch.nn.Parameter(torch.ones(3))
    (tensor,) = flatten_state({"w": parameter}).tensors
    assert tensor.data_ptr() == parameter.data_ptr()
    assert not tensor.requires_grad


def test_a_tensor_that_occurs_twice_is_listed_twice():
    tensor = torch.ones(2)
    flat = flatten_state({"a": tensor, "b": [tensor]})
    assert flat.names == ["a", "b.0"]
    assert all(one is not tensor and one.equal(tensor) for one in flat.tensors)


def test_names_that_would_be_the_same_are_told_apart():
    flat = flatten_state({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), 0: torch.ones(1)})
    assert flat.names == ["a.b", "a.b#", "0"]


def test_lazily_conjugated_and_negated_tensors_come_back_as_the_values_they_show():
    conjugated = torch.tensor([1 + 2j]).conj()
    flat = flatten_state([conjugated, conjugated.imag])
    assert flat.tensors[0].numpy().tolist() == [1 - 2j]
    assert flat.tensors[1].numpy().tolist() == [-2]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [0, {"b": {1, 2}}]}, r"state\['a'\]\[1\]\['b'\]=\{1, 2\}: set can't"),
        ({"a": lambda: 0}, r"state\['a'\]=<function .*: function can't"),
        ({"a": np.int64(3)}, r"state\['a'\]=.*int64"),
        ([b"x"], r"state\[0\]=b'x': bytes"),
        ({"a": {True: 1}}, r"a key of state\['a'\]=True: keys of a state must be str or int"),
        ({(1, 2): 1}, r"a key of state=\(1, 2\)"),
        ({"w": torch.ones(2).to_sparse()}, r"state\['w'\]: .*sparse_coo"),
        ({"w": torch.ones(2, device="meta")}, r"state\['w'\]: .*meta"),
        ({"w": torch.nn.UninitializedParameter()}, r"state\['w'\]: .*UninitializedParameter"),
        (torch.Size([1]), "state=.*: Size can't"),
    ],
)
def test_what_is_no_state_is_refused_with_its_place_and_the_way_out(tree, message):
    with pytest.raises(UnsupportedError, match=message + ".*convert it, or leave it out"):
        flatten_state(tree)


def test_a_tree_that_holds_itself_is_refused():
    tree = {}
    tree["self"] = tree
    with pytest.raises(UnsupportedError, match="holds itself"):
        flatten_state(tree)


@pytest.mark.parametrize(
    "skeleton",
    [
        "",
        "{",
        "{}",
        '{"list":1,"tuple":2}',
        '{"set":[]}',
        '{"tensor":0}',
        '{"dict":[[1]]}',
        '{"dict":[[[],1]]}',
        '{"dict":3}',
        '{"float":"00"}',
        '{"int":"0xg"}',
        "[" * 100_000 + "]" * 100_000,
    ],
)
def test_what_is_no_skeleton_is_refused(skeleton):
    with pytest.raises(StateError, match="flatten_state"):
        unflatten_state(skeleton, [])


def test_tensors_without_a_place_are_refused():
    with pytest.raises(StateError, match="1 of 1 tensors"):
        unflatten_state("[]", [torch.ones(1)])


OPTIMIZERS = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "sgd without state": lambda parameters: SGD(parameters, lr=0.1),
    "adam": lambda parameters: Adam(parameters, lr=0.1, amsgrad=True),
    "adam with a tensor lr": lambda parameters: Adam(parameters, lr=torch.tensor(0.1)),
    "adamw": lambda parameters: AdamW([{"params": parameters, "lr": 0.05}], weight_decay=0.1),
    "rmsprop": lambda parameters: RMSprop(parameters, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda parameters: Adagrad(parameters, lr=0.1),
}


def take_steps(parameters, optimizer, *, num_steps, schedule=None):
    lrs = []
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = parameter.detach().cos()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        lrs.append(float(optimizer.param_groups[0]["lr"]))
    return lrs


def make_parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(()))]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizers_state_comes_back_and_goes_on_to_the_bit(kind):
    first = make_parameters()
    optimizer = OPTIMIZERS[kind](first)
    take_steps(first, optimizer, num_steps=10)
    state = there_and_back(optimizer.state_dict())
    assert bits(state) == bits(optimizer.state_dict())

    second = [torch.nn.Parameter(parameter.detach().clone()) for parameter in first]
    other = OPTIMIZERS[kind](second)
    other.load_state_dict(pickle_free_copy(state))
    take_steps(first, optimizer, num_steps=3)
    take_steps(second, other, num_steps=3)
    assert bits(first) == bits(second)


def pickle_free_copy(tree):
    flat = flatten_state(tree)
    return unflatten_state(flat.skeleton, [tensor.clone() for tensor in flat.tensors])


def warm_up_then_cosine(optimizer):
    parts = [
        lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=8),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=30),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[8])


def two_at_once(optimizer):
    parts = [
        lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
        lr_scheduler.MultiStepLR(optimizer, milestones=[5, 12, 12], gamma=0.5),
    ]
    return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)


SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=4),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, milestones=[3, 12, 12]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, total_iters=12),
    "linear": lambda o: lr_scheduler.LinearLR(o, total_iters=15),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=18),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4, T_mult=2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "function": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplied": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.95),
    "sequence": warm_up_then_cosine,
    "chain": two_at_once,
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedules_state_comes_back_and_goes_on_with_the_same_rates(kind):
    first, second = make_parameters(), make_parameters()
    optimizer = SGD(first, lr=0.1, momentum=0.9)
    schedule = SCHEDULES[kind](optimizer)
    take_steps(first, optimizer, num_steps=10, schedule=schedule)
    state = there_and_back({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
    assert bits(state["schedule"]) == bits(schedule.state_dict())

    other = SGD(second, lr=0.1, momentum=0.9)
    other_schedule = SCHEDULES[kind](other)
    other.load_state_dict(pickle_free_copy(state["optimizer"]))
    other_schedule.load_state_dict(state["schedule"])
    expected = take_steps(first, optimizer, num_steps=10, schedule=schedule)
    assert take_steps(second, other, num_steps=10, schedule=other_schedule) == expected
