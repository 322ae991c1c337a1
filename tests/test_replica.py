"""The stable module: the inner module's parameters, keys and behaviour, whatever wraps it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elastane.errors import ArgumentError, UnsupportedError
from elastane.replica import (
    Replica,
    check_model,
    fewest_samples,
    idle_batch_norm,
    merge_batch_statistics,
    without_sync,
    wrap,
)


class Net(nn.Module):
    """A model with a parameter, a buffer, attributes and methods of its own."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))
        self.config = {"width": 4}
        self.calls = 0

    def forward(self, inputs, *, double=False):
        self.calls += 1
        outputs = self.body(inputs) * self.scale + self.shift
        return 2 * outputs if double else outputs

    def width(self):
        return self.config["width"]

    @property
    def depth(self):
        return len(self.body)


class Recorder(nn.Module):
    """A wrapper that marks what went through it."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.used = 0

    def forward(self, *args, **kwargs):
        self.used += 1
        return self.module(*args, **kwargs)


@pytest.fixture
def group():
    """A gloo group of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


# What it is to its users


def test_parameters_buffers_modules_and_keys_are_the_inner_modules():
    inner = Net()
    model = Replica(inner)
    for names in ("named_parameters", "named_buffers", "named_children"):
        mine, theirs = dict(getattr(model, names)()), dict(getattr(inner, names)())
        assert list(mine) == list(theirs)
        assert all(mine[name] is theirs[name] for name in mine)
    assert list(model.state_dict()) == list(inner.state_dict())
    assert model.inner is inner


def test_keys_stay_the_inner_modules_while_it_is_wrapped(group):
    inner = Net()
    model = Replica(inner)
    keys = list(model.state_dict())
    model.use(wrap(inner, group=group, options={}))
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in inner.named_parameters()
    ]


def test_a_state_loads_into_the_inner_module_and_from_it():
    model, other = Replica(Net()), Net()
    result = model.load_state_dict(other.state_dict())
    assert not result.missing_keys
    assert torch.equal(model.inner.body[0].weight, other.body[0].weight)
    other.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="scale"):
        model.load_state_dict({"body.0.weight": other.body[0].weight})


def test_attributes_methods_and_properties_of_the_inner_module_are_there():
    model = Replica(Net())
    assert model.config is model.inner.config
    assert (model.width(), model.depth) == (4, 3)
    assert model.scale is model.inner.scale
    assert model.body is model.inner.body
    with pytest.raises(AttributeError, match=r"Net.*nothing"):
        _ = model.nothing
    assert not hasattr(model, "nothing")


@pytest.mark.parametrize("change", ["train", "eval"])
def test_training_mode_reaches_the_inner_module_its_children_and_the_wrapper(change):
    inner = Net().train(change == "eval")
    model, wrapper = Replica(inner), Recorder(inner).train(change == "eval")
    model.use(wrapper)
    assert getattr(model, change)() is model
    wanted = change == "train"
    assert [model.training, inner.training, wrapper.training] == [wanted] * 3
    assert all(module.training is wanted for module in inner.modules())
    assert model.train(not wanted).training is not wanted


def test_a_replica_begins_in_the_mode_of_its_module():
    assert Replica(Net()).training
    assert not Replica(Net().eval()).training


def test_moving_and_freezing_change_the_inner_module():
    model = Replica(Net())
    weight = model.inner.body[0].weight
    assert model.double() is model
    assert model.inner.body[0].weight is weight
    assert weight.dtype == model.inner.shift.dtype == torch.float64
    model.requires_grad_(False)
    assert not weight.requires_grad


def test_forward_goes_through_the_wrapper_with_gradients_and_past_it_without():
    inner = Net().eval()
    model, wrapper = Replica(inner), Recorder(inner)
    inputs = torch.randn(2, 3)
    wanted = inner(inputs, double=True)
    assert torch.equal(model(inputs, double=True), wanted)
    model.use(wrapper)
    assert torch.equal(model(inputs, double=True), wanted)
    assert wrapper.used == 1
    with torch.no_grad():
        assert torch.equal(model(inputs, double=True), wanted)
    with torch.inference_mode():
        assert torch.equal(model(inputs, double=True), wanted)
    assert wrapper.used == 1
    model.use(None)
    model(inputs)
    assert wrapper.used == 1


def test_forward_hooks_on_it_see_the_calls():
    model, seen = Replica(Net()), []
    handle = model.register_forward_hook(lambda *call: seen.append(call[-1].shape))
    model(torch.randn(2, 3))
    handle.remove()
    model(torch.randn(2, 3))
    assert seen == [(2, 4)]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_bare_independent_and_in_the_same_mode(copied, group):
    model = Replica(Net().eval())
    model.use(wrap(model.inner, group=group, options={}))
    other = copied(model)
    assert isinstance(other, Replica)
    assert other.inner is not model.inner
    assert other.__dict__["_wrapper"] is None
    assert not other.training
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine is not theirs
        assert torch.equal(mine, theirs)
    assert [name for name, _ in other.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    with torch.no_grad():
        other.scale.add_(1)
    assert not torch.equal(model.scale, other.scale)
    assert other(torch.randn(2, 3)).shape == (2, 4)


def test_an_average_of_the_weights_can_be_kept(group):
    model = Replica(Net())
    model.use(wrap(model.inner, group=group, options={}))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    start = model.scale.detach().clone()
    average.update_parameters(model)
    with torch.no_grad():
        model.scale.add_(2.0)
    average.update_parameters(model)
    assert torch.allclose(average.module.scale, start + 1.0)
    assert average.eval()(torch.randn(2, 3)).shape == (2, 4)
    assert model.training
    assert not average.module.inner.training


# Wrapped in DDP


def test_wrapping_broadcasts_no_buffers_in_forward(group):
    wrapper = wrap(Net(), group=group, options={"bucket_cap_mb": 1})
    assert isinstance(wrapper, DistributedDataParallel)
    assert not wrapper.will_sync_module_buffers()


def test_without_sync_covers_the_wrapper_and_is_nothing_without_one(group):
    model = Replica(Net())
    with without_sync(model):
        pass
    wrapper = wrap(model.inner, group=group, options={})
    model.use(wrapper)
    with without_sync(model):
        assert not wrapper.require_backward_grad_sync
    assert wrapper.require_backward_grad_sync


# What is refused


def test_a_bare_model_is_accepted():
    check_model(Net(), ddp={"find_unused_parameters": True, "bucket_cap_mb": 5})


@pytest.mark.usefixtures("group")
def test_a_sharded_model_is_accepted_without_options_of_ddp():
    model = fully_shard(Net(), mesh=init_device_mesh("cpu", (1,)))
    check_model(model, ddp={})
    with pytest.raises(ArgumentError, match="sharded model"):
        check_model(model, ddp={"bucket_cap_mb": 5})


@pytest.mark.parametrize(
    "make",
    [
        DistributedDataParallel,
        DataParallel,
        lambda model: nn.Sequential(DataParallel(model)),
        Replica,
    ],
    ids=["DDP", "DataParallel", "a wrapped child", "Replica"],
)
@pytest.mark.usefixtures("group")
def test_models_that_are_wrapped_already_are_refused(make):
    with pytest.raises(UnsupportedError, match=r"wrapped already.*pass the bare module"):
        check_model(make(Net()), ddp={})


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embeddings_are_refused_by_their_name(kind):
    with pytest.raises(UnsupportedError, match=r"model\.1.*sparse=False"):
        check_model(nn.Sequential(nn.Linear(1, 1), kind(5, 2, sparse=True)), ddp={})
    check_model(kind(5, 2), ddp={})


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ArgumentError, match="Unfreeze"):
        check_model(Net().requires_grad_(False), ddp={})
    with pytest.raises(ArgumentError, match="Unfreeze"):
        check_model(nn.ReLU(), ddp={})


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("find_unused", "unknown option"),
        ("process_group", "set by the session"),
        ("device_mesh", "set by the session"),
        ("broadcast_buffers", "set by the session"),
        ("forward_sync_buffers", "set by the session"),
        ("module", "set by the session"),
        ("self", "set by the session"),
    ],
)
def test_ddp_options_that_are_unknown_or_the_sessions_are_refused(name, match):
    with pytest.raises(ArgumentError, match=match):
        check_model(Net(), ddp={name: None})


# Batch statistics


@pytest.mark.parametrize(
    ("model", "fewest"),
    [
        (Net(), 2),
        (nn.Sequential(nn.BatchNorm2d(3)), 2),
        (nn.SyncBatchNorm(3), 2),
        (
            nn.Sequential(
                nn.Linear(1, 1), nn.LayerNorm(1), nn.InstanceNorm1d(2), nn.GroupNorm(1, 1)
            ),
            1,
        ),
    ],
)
def test_models_with_batch_statistics_need_two_samples(model, fewest):
    assert fewest_samples(model) == fewest


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("raises", [False, True])
def test_an_idle_workers_samples_leave_no_trace_in_the_running_averages(momentum, raises):
    model = Net()
    model.body[1].momentum = momentum
    model(torch.randn(4, 3))
    before = copy.deepcopy(model.state_dict())

    def idle():
        with idle_batch_norm(model):
            model(torch.randn(4, 3) + 5)
            if raises:
                raise KeyError("from the block")

    if raises:
        with pytest.raises(KeyError, match="from the block"):
            idle()
    else:
        idle()
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert model.body[1].momentum == momentum
    model(torch.randn(4, 3))
    assert not torch.equal(model.body[1].running_mean, before["body.1.running_mean"])
    assert int(model.body[1].num_batches_tracked) == 2


def test_layers_without_running_averages_may_be_idle_too():
    model = nn.BatchNorm1d(3, track_running_stats=False)
    with idle_batch_norm(model):
        model(torch.randn(4, 3))
    assert model.num_batches_tracked is None


def test_merged_batch_statistics_are_exact_and_leave_out_who_has_seen_nothing():
    def layer(mean, variance, batches):
        norm = torch.nn.BatchNorm1d(4)
        norm.running_mean.copy_(torch.tensor(mean))
        norm.running_var.copy_(torch.tensor(variance))
        norm.num_batches_tracked.fill_(batches)
        return norm

    means, variances = [1.0, 100.0, 1000.0, 5000.0], [0.01] * 4
    norms = [layer(means, variances, 6), layer(means, variances, 6), torch.nn.BatchNorm1d(4)]
    rows = []
    for norm in norms:
        merge_batch_statistics(norm, sum_over_workers=lambda row: rows.append(row.clone()))
    norms = [layer(means, variances, 6), layer(means, variances, 6), torch.nn.BatchNorm1d(4)]
    for norm in norms:
        merge_batch_statistics(norm, sum_over_workers=lambda row: row.copy_(sum(rows)))
        assert norm.running_mean.tolist() == means
        assert norm.running_var.tolist() == pytest.approx(variances, rel=1e-5)
        assert norm.num_batches_tracked == 6
    fresh = torch.nn.BatchNorm1d(4)
    merge_batch_statistics(fresh, sum_over_workers=lambda _: None)
    assert fresh.running_var.tolist() == [1.0] * 4
