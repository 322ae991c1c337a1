"""State copied from one worker to others, and a model's state taken and given back."""

import json
import multiprocessing
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from test_flatten import bits
from torch import nn
from workers import run_workers

from elastane.elastic.snapshot import load_state, state_of
from elastane.elastic.transfer import receive_state, send_state
from elastane.errors import CommunicationError, StateError

processes = pytest.mark.processes


class Counting(nn.Module):
    """Extra state, a 0-dim buffer, and one that isn't persistent."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("total", torch.tensor(0, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.total += len(x)
        self.scratch += 1
        return x

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def make(kind="sgd", *, seed=0, dtype=torch.float32, width=8):
    torch.manual_seed(seed)
    layers = nn.Linear(width, width), nn.BatchNorm1d(width), Counting(), nn.Linear(width, 1)
    model = nn.Sequential(*layers).to(dtype)
    if kind == "adam":
        return model, torch.optim.Adam(model.parameters(), lr=0.01)
    momentum = 0.9 if kind == "sgd" else 0.0
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def train(model, optimizer, *, num_steps, width=8):
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(4, width, generator=generator).to(dtype)).sum().backward()
        optimizer.step()


def odd_tree():
    return {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "large": torch.arange(600_000).view(2, -1),
        "large and turned": torch.arange(600_000.0).view(2, -1).t(),
        "complex": torch.tensor([1 + 2j]).conj(),
        "nothing": [None, (), {3: float("inf")}],
    }


def copy_odd_tree():
    if dist.get_rank() == 0:
        send_state(odd_tree(), to=range(1, dist.get_world_size()), group=dist.group.WORLD)
        return odd_tree()
    return receive_state(source=0, group=dist.group.WORLD)


@processes
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_kind_of_tensor_arrives_to_the_bit_at_every_receiver(world_size, tmp_path):
    for tree in run_workers(copy_odd_tree, world_size=world_size, folder=tmp_path):
        assert bits(tree) == bits(odd_tree())


def copy_training(kind, dtype, in_place, num_steps, num_own_steps):
    """Rank 1 trains on another seed, takes over rank 0's state; both then train on."""
    rank = dist.get_rank()
    model, optimizer = make(kind, seed=rank, dtype=dtype)
    train(model, optimizer, num_steps=num_own_steps if rank else num_steps)
    held = list(model.parameters()) + list(model.buffers())
    pointers = [tensor.data_ptr() for tensor in held]
    if rank == 0:
        send_state(state_of(model, optimizer), to=1, group=dist.group.WORLD)
    else:
        into = list(state_of(model, optimizer)["model"].values()) if in_place else ()
        tree = receive_state(source=0, group=dist.group.WORLD, into=into)
        load_state(model, optimizer, tree)
    assert [tensor.data_ptr() for tensor in held] == pointers
    after_copy = bits(state_of(model, optimizer))
    train(model, optimizer, num_steps=2)
    return [repr(after_copy), repr(bits(state_of(model, optimizer)))]


@processes
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "num_steps", "num_own_steps"),
    [
        ("sgd", torch.float32, 3, 0),
        ("sgd", torch.bfloat16, 3, 1),
        ("adam", torch.float32, 3, 0),
        ("adam", torch.bfloat16, 2, 5),
        ("plain", torch.float64, 3, 0),
        ("sgd", torch.float32, 0, 2),
    ],
)
def test_a_receiver_goes_on_as_the_sender_to_the_bit(
    kind, dtype, num_steps, num_own_steps, in_place, tmp_path
):
    arguments = kind, dtype, in_place, num_steps, num_own_steps
    sender, receiver = run_workers(copy_training, *arguments, world_size=2, folder=tmp_path)
    assert sender == receiver


def receive_into_what_does_not_fit():
    if dist.get_rank() == 0:
        for _ in range(2):
            send_state([torch.ones(3)], to=1, group=dist.group.WORLD)
        return []
    messages = []
    for into in ([torch.zeros(3, dtype=torch.float64)], [torch.zeros(3), torch.zeros(1)]):
        with pytest.raises(StateError) as caught:
            receive_state(source=0, group=dist.group.WORLD, into=into)
        assert not any(tensor.any() for tensor in into)
        messages.append(str(caught.value))
        dist.recv(torch.empty(3), src=0, tag=2)
    return messages


@processes
def test_a_state_that_does_not_fit_leaves_the_tensors_as_they_were(tmp_path):
    _, messages = run_workers(receive_into_what_does_not_fit, world_size=2, folder=tmp_path)
    assert "into[0] is torch.float64 (3,) and torch.float32 (3,) is sent" in messages[0]
    assert "into has 2 tensors" in messages[1]


def in_group(rank, folder, function, timeout_s):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    dist.barrier()
    try:
        function()
    except CommunicationError as error:
        kept = repr(error.__cause__), repr(error.__context__)
        (folder / f"error-{rank}").write_text(json.dumps([str(error), *kept]))
    os._exit(0)


def send_much():
    tree = [torch.ones(1 << 20) for _ in range(16)] + [torch.ones(3)] * 50
    send_state(tree, to=1, group=dist.group.WORLD)


def end_after_the_description(number):
    receive = dist.group.WORLD.recv
    length = torch.zeros(1, dtype=torch.int64)
    receive([length], 0, 0).wait()
    receive([torch.empty(int(length), dtype=torch.uint8)], 0, 1).wait()
    os.kill(os.getpid(), number)


def be_killed_after_the_description():
    end_after_the_description(signal.SIGKILL)


def stop_after_the_description():
    end_after_the_description(signal.SIGSTOP)


def be_killed_while_sending():
    group = dist.group.WORLD
    description = json.dumps(
        {"skeleton": '[{"tensor":0}]', "tensors": [["torch.float32", [1 << 22], "cpu"]]}
    ).encode()
    group.send([torch.tensor([len(description)])], 1, 0).wait()
    group.send([torch.frombuffer(bytearray(description), dtype=torch.uint8)], 1, 1).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def receive_much():
    receive_state(source=0, group=dist.group.WORLD)


def run_pair(first, second, folder, *, timeout_s, waits_for):
    """Run two workers, wait for one of them, and return the error that it met."""
    context = multiprocessing.get_context("forkserver")
    pair = [
        context.Process(target=in_group, args=(rank, folder, function, timeout_s))
        for rank, function in enumerate([first, second])
    ]
    try:
        for process in pair:
            process.start()
        pair[waits_for].join(30)
        assert pair[waits_for].exitcode == 0
    finally:
        for process in pair:
            process.kill()
            process.join()
    return json.loads((folder / f"error-{waits_for}").read_text())


@processes
@pytest.mark.parametrize(
    ("first", "second", "timeout_s", "waits_for"),
    [
        (send_much, be_killed_after_the_description, 60, 0),
        (send_much, stop_after_the_description, 1, 0),
        (be_killed_while_sending, receive_much, 60, 1),
    ],
)
def test_a_peer_that_ends_in_the_middle_is_an_error_that_keeps_no_frames(
    first, second, timeout_s, waits_for, tmp_path
):
    message, *kept = run_pair(first, second, tmp_path, timeout_s=timeout_s, waits_for=waits_for)
    assert "the process group broke while state was copied" in message
    assert kept == ["None", "None"]


def give(source, target):
    """Give `target` the state of `source`, by way of a copy."""
    tree = state_of(*source)
    tree["optimizer"]["state"] = {
        index: {name: value.clone() for name, value in values.items()}
        for index, values in tree["optimizer"]["state"].items()
    }
    load_state(*target, tree)


def test_another_models_state_changes_nothing():
    model, optimizer = make()
    train(model, optimizer, num_steps=1)
    before = repr(bits(state_of(model, optimizer)))
    others = [make(width=9), make(dtype=torch.float64)]
    more = nn.Sequential(model, nn.Linear(1, 1))
    others.append((more, torch.optim.SGD(more.parameters())))
    frozen = make()[0]
    others.append((frozen, torch.optim.SGD([frozen[0].weight])))
    for other in others:
        with pytest.raises(StateError, match=r"build the model|another (model|optimizer)'s"):
            load_state(model, optimizer, state_of(*other))
    assert repr(bits(state_of(model, optimizer))) == before


def test_a_state_in_a_wider_dtype_than_its_parameter_keeps_its_bits():
    source, target = make(dtype=torch.bfloat16), make(seed=1, dtype=torch.bfloat16)
    train(*source, num_steps=1)
    for values in source[1].state.values():
        values["momentum_buffer"] = torch.randn(values["momentum_buffer"].shape)
    give(source, target)
    assert bits(state_of(*target)) == bits(state_of(*source))


def test_a_tensor_lr_stays_the_same_object():
    source, target = make(), make(seed=1)
    source[1].param_groups[0]["lr"] = torch.tensor(0.3)
    own = target[1].param_groups[0]["lr"] = torch.tensor(0.1)
    give(source, target)
    assert target[1].param_groups[0]["lr"] is own
    assert own == torch.tensor(0.3)
    own.fill_(0.2)
    assert source[1].param_groups[0]["lr"] == torch.tensor(0.3)


def test_state_in_another_memory_format_is_laid_out_as_its_parameter():
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    source, target = build(0), build(1)
    source[0](torch.randn(2, 3, 5, 5)).sum().backward()
    source[1].step()
    tree = state_of(*source)
    buffer = tree["optimizer"]["state"][0]["momentum_buffer"]
    tree["optimizer"]["state"][0]["momentum_buffer"] = buffer.contiguous().clone()
    load_state(*target, tree)
    weight = target[0].weight
    loaded = target[1].state[weight]["momentum_buffer"]
    assert loaded.stride() == weight.stride() != buffer.contiguous().stride()
    assert loaded.equal(buffer)


def test_tied_parameters_occur_once_and_stay_tied():
    def build(seed):
        torch.manual_seed(seed)
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        second.weight = first.weight
        model = nn.Sequential(first, second)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    source, target = build(0), build(1)
    assert list(state_of(*source)["model"]) == ["0.weight", "0.bias", "1.bias"]
    load_state(*target, state_of(*source))
    assert target[0][1].weight is target[0][0].weight
    assert target[0][1].weight.equal(source[0][0].weight)
