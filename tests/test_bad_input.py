"""Bad input gets an error that names the argument, the value, the rule and the way out."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from training import Digits, build_model, train

import elastane
from elastane import (
    LEGW,
    AdamScale,
    GlobalBatch,
    Identity,
    LoaderOptions,
    LocalBatch,
    Measuring,
    MomentumRamp,
    Session,
    WarmUp,
)
from elastane.errors import ArgumentError, ElastaneError, UnsupportedError


def build(model: nn.Module | None = None, **changes: Any) -> Session:
    model = build_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments: dict[str, Any] = {
        "optimizer": optimizer,
        "dataset": Digits(),
        "base_batch_size": 8,
        "num_steps": 10,
        "progress_bar": False,
    }
    return Session(model, **(arguments | changes))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


def other_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(build_model().parameters(), lr=0.1)


def build_with_schedule(make: Callable[[torch.optim.Optimizer], Any]) -> Session:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return build(model, optimizer=optimizer, schedule=make(optimizer))


WRONG_ARGUMENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "base batch 0": (
        lambda: build(base_batch_size=0),
        "base_batch_size=0: must be a whole number of at least 1. Pass the batch size for which",
    ),
    "base batch negative": (lambda: build(base_batch_size=-16), "base_batch_size=-16"),
    "base batch a float": (lambda: build(base_batch_size=16.0), "base_batch_size=16.0"),
    "no steps": (
        lambda: build(num_steps=0),
        "num_steps=0: must be a finite number above 0. Base steps for which the schedule was",
    ),
    "negative steps": (lambda: build(num_steps=-5), "num_steps=-5"),
    "endless steps": (lambda: build(num_steps=float("inf")), "num_steps=inf"),
    "neither steps nor epochs": (lambda: build(num_steps=None), "num_steps=None"),
    "steps and epochs": (
        lambda: build(num_epochs=2),
        "num_steps=10: given together with num_epochs=2. Pass one of them",
    ),
    "no epochs": (lambda: build(num_steps=None, num_epochs=0), "num_epochs=0"),
    "scheduler of another optimizer": (
        lambda: build(schedule=CosineAnnealingLR(other_optimizer(), T_max=10)),
        "belongs to another optimizer. Build it on the optimizer that the session gets",
    ),
    "one cycle that ends too early": (
        lambda: build_with_schedule(lambda o: OneCycleLR(o, max_lr=0.1, total_steps=5)),
        "ends after 5 base steps, before the run's 10. Give OneCycleLR total_steps=num_steps",
    ),
    "schedule that is nothing": (lambda: build(schedule=0.1), "schedule=0.1: must be a torch sch"),
    "parameters of another model": (
        lambda: build(optimizer=other_optimizer()),
        "optimizer.param_groups[0]['params'][0]='tensor of shape (24, 64)': is no parameter of",
    ),
    "no length": (lambda: build(dataset=NoLength()), "has no length. Give it __len__"),
    "no samples": (lambda: build(dataset=[]), "dataset=[]: is empty. Pass at least one sample"),
    "nothing to train": (
        lambda: build(
            nn.Linear(2, 2).requires_grad_(False),
            optimizer=torch.optim.SGD([torch.ones(1)], lr=0.1),
        ),
        "is no parameter of the model",
    ),
    "unknown average": (
        lambda: Measuring(averaging="mean"),
        "averaging='mean': unknown option. Choose one of 'debiased', 'paper'",
    ),
    "unknown grouping": (lambda: Measuring(per="layer"), "per='layer': unknown option"),
    "never measured": (lambda: Measuring(every=0), "every=0"),
    "smoothing of 1": (lambda: Measuring(smoothing=1.0), "smoothing=1.0: must be at least 0 and"),
    "unknown shrink": (lambda: MomentumRamp(shrink="slow"), "shrink='slow': unknown option"),
    "negative ramp": (lambda: MomentumRamp(length=-1), "length=-1"),
    "unknown progress": (lambda: Identity(progress="loss"), "progress='loss': unknown option"),
    "power 0": (lambda: AdamScale(power=0), "power=0"),
    "warm-up over nothing": (lambda: WarmUp(rule=Identity(), fraction=0), "fraction=0"),
    "LEGW without warm-up": (lambda: LEGW(warmup_steps=0), "warmup_steps=0"),
    "batch of 0": (lambda: LocalBatch(0), "samples=0"),
    "more micro-batches than samples": (
        lambda: LocalBatch(4, micro_batches=5),
        "micro_batches=5: more than the 4 samples",
    ),
    "grid and limit": (
        lambda: GlobalBatch(8, micro_batches=2, max_micro_batch=4),
        "micro_batches=2: can't be combined with max_micro_batch=4",
    ),
    "shares for two workers": (
        lambda: build(batch=GlobalBatch(8, shares=(1, 2))),
        "has 2 numbers for 1 workers. Give one share a worker",
    ),
    "unknown DDP option": (
        lambda: build(ddp={"find_unused": True}),
        "ddp['find_unused']=True: unknown option. Pass arguments of DistributedDataParallel",
    ),
    "DDP option of ours": (
        lambda: build(ddp={"process_group": None}),
        "ddp['process_group']=None: is set by the session",
    ),
    "max_norm 0": (lambda: build(max_norm=0.0), "max_norm=0.0"),
    "loader processes": (lambda: LoaderOptions(num_workers=-1), "num_workers=-1"),
    "start method": (lambda: LoaderOptions(start_method="thread"), "start_method='thread'"),
    "seed": (lambda: LoaderOptions(seed=0.5), "seed=0.5: must be a whole number"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named_with_value_rule_and_way_out(name: str) -> None:
    act, message = WRONG_ARGUMENTS[name]
    with pytest.raises(ArgumentError) as caught:
        act()
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "ReduceLROnPlateau": (
        lambda: build_with_schedule(ReduceLROnPlateau),
        "pass schedule=None and call plateau.step(metric) yourself",
    ),
    "an iterable dataset": (lambda: build(dataset=Endless()), "dataset is a Endless, an iterable"),
    "a weighted sampler": (
        lambda: build(dataset=DataLoader(Digits(), sampler=WeightedRandomSampler([1.0] * 301, 8))),
        "dataset is a DataLoader: pass the dataset itself",
    ),
    "a wrapped model": (
        lambda: build(DataParallel(build_model())),
        "model is wrapped already, in DataParallel: pass the bare module",
    ),
    "a session's model": (
        lambda: build(build().model),
        "model is wrapped already, in Replica",
    ),
    "sparse gradients": (
        lambda: build(nn.Sequential(nn.Embedding(4, 2, sparse=True))),
        "model.0 has sparse gradients, which are not supported: build it with sparse=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_kind_of_object_that_is_not_supported_is_refused_by_name(name: str) -> None:
    act, message = REFUSED[name]
    with pytest.raises(UnsupportedError) as caught:
        act()
    assert message in str(caught.value)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("result", [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, 0.0)])
def test_a_rules_answer_that_is_not_finite_and_positive_ends_the_step_before_it_acts(
    result: tuple[float, float],
) -> None:
    model = build_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    session = build(model, rule=lambda now: result)  # noqa: ARG005 (a rule)
    with session, pytest.raises(ArgumentError, match=r"finite and above 0"):
        train(session)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert (session.position, session.progress) == (0, 0.0)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    session = build()
    with session, pytest.raises(ArgumentError, match=r"loss='tensor of shape \(8, 10\)'"):
        for images, _, _ in session:
            session.backward(session.model(images))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_negative_or_not_finite_is_refused(weight: float) -> None:
    session = build()
    with session, pytest.raises(ArgumentError, match="weight="):
        for images, _, _ in session:
            session.backward(session.model(images).mean(), weight=weight)


def test_an_option_that_nothing_knows_is_python_s_own_error() -> None:
    with pytest.raises(TypeError, match="batch_size"):
        build(batch_size=4)


def test_every_error_of_ours_has_one_root() -> None:
    assert issubclass(ArgumentError, ElastaneError)
    assert issubclass(UnsupportedError, ElastaneError)


# BC-15
def test_no_option_can_slip_into_anothers_place():
    by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    for name in elastane.__all__:
        found = getattr(elastane, name)
        if callable(found) and not issubclass(found, Exception):
            kinds = [one.kind for one in signature(found).parameters.values()]
            assert sum(kind in by_place for kind in kinds) <= 1, name
