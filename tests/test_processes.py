"""Several workers train what one worker trains: the same gain, progress, lr and weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from training import Digits, build_model, build_session, session_over, train, weights_of
from workers import run_workers

from elastane import AdamScale, GlobalBatch, LoaderOptions, LocalBatch, Measuring, Session
from elastane.errors import CommunicationError, StateError, UsageError
from elastane.telemetry import read_events

pytestmark = pytest.mark.processes

FLOAT64 = torch.float64


def train_digits(
    dtype: torch.dtype = torch.float32,
    *,
    num_steps: float = 1e9,
    max_steps: int | None = None,
    batch: Any = None,
    state: Path | None = None,
    save: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train the shared job in whatever world this process is in; load and save on request."""
    model = build_model(dtype)
    session, optimizer = build_session(
        model,
        dataset=Digits(dtype=dtype),
        num_steps=num_steps,
        lr=0.02,
        schedule=lambda progress: 0.9995**progress,
        batch=batch or GlobalBatch(22, micro_batches=4),
        **options,
    )
    parts = {"model": session.model, "optimizer": optimizer, "session": session}
    if state is not None:
        saved = torch.load(state, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    with session:
        record = train(session, max_steps=max_steps)
        if save is not None and session.world.rank == 0:
            torch.save({name: part.state_dict() for name, part in parts.items()}, save)
    return record


def train_with(keywords: dict[str, Any]) -> dict[str, Any]:
    return train_digits(**keywords)


NUMBERS = ("gain", "progress", "lr", "loss", "grad_norm")


def assert_same(record: dict[str, Any], wanted: dict[str, Any], *, rel: float) -> None:
    for name in NUMBERS:
        assert record[name] == pytest.approx(wanted[name], rel=rel, abs=rel), name
    assert record["position"] == wanted["position"]
    assert torch.allclose(record["weights"], wanted["weights"], rtol=rel, atol=rel)


def assert_ranks_equal(records: list[dict[str, Any]]) -> None:
    for record in records[1:]:
        for name in (*NUMBERS, "position"):
            assert record[name] == records[0][name], name
        assert torch.equal(record["weights"], records[0]["weights"])


@pytest.mark.parametrize(
    ("world_size", "shares"), [(2, None), (4, None), (2, (3, 1))], ids=["2x2", "4x1", "3+1"]
)
@pytest.mark.parametrize(
    ("dtype", "rel"), [(FLOAT64, 1e-10), (torch.float32, 2e-4)], ids=["float64", "float32"]
)
def test_the_same_micro_batches_give_the_same_run_however_they_are_dealt(
    world_size: int, shares: Any, dtype: torch.dtype, rel: float, tmp_path: Path
) -> None:
    # 22 samples in 4 micro-batches are 6, 6, 5, 5; an epoch of 301 ends with 15: 4, 4, 4, 3.
    wanted = train_digits(dtype, max_steps=200)
    batch = GlobalBatch(22, micro_batches=4, shares=shares)
    keywords = {"dtype": dtype, "max_steps": 200, "batch": batch}
    records = run_workers(train_with, keywords, world_size=world_size, folder=tmp_path)
    assert len(wanted["gain"]) == 200
    assert max(wanted["gain"]) > 1.3
    assert_ranks_equal(records)
    assert_same(records[0], wanted, rel=rel)


# BC-06
def test_workers_with_one_micro_batch_each_are_one_process_with_as_many(tmp_path: Path) -> None:
    keywords = {"dtype": FLOAT64, "max_steps": 100, "batch": LocalBatch(6)}
    records = run_workers(train_with, keywords, world_size=3, folder=tmp_path)
    wanted = train_digits(FLOAT64, max_steps=100, batch=LocalBatch(18, micro_batches=3))
    assert_ranks_equal(records)
    assert_same(records[0], wanted, rel=1e-10)


# BC-25
def test_an_unequal_batch_over_workers_is_still_the_mean_over_samples(tmp_path: Path) -> None:
    # 16 samples over 3 workers are 6, 5, 5 (torchft #302).
    keywords = {"dtype": FLOAT64, "max_steps": 30, "batch": GlobalBatch(16)}
    records = run_workers(train_with, keywords, world_size=3, folder=tmp_path)
    wanted = train_digits(FLOAT64, max_steps=30, batch=GlobalBatch(16, micro_batches=3))
    assert [len(indices) for indices, _ in (r["seen"][0] for r in records)] == [6, 5, 5]
    assert_same(records[0], wanted, rel=1e-10)


# BC-24
def test_each_sample_of_an_epoch_is_seen_once_over_all_workers(tmp_path: Path) -> None:
    keywords = {"max_steps": 28, "batch": GlobalBatch(22)}
    records = run_workers(train_with, keywords, world_size=3, folder=tmp_path)
    assert records[0]["position"][-1] == 2 * 301
    seen = Counter(
        index
        for record in records
        for indices, weight in record["seen"]
        if weight
        for index in indices
    )
    assert seen == Counter(dict.fromkeys(range(301), 2))


def first_step(batch: Any) -> dict[str, Any]:
    model = build_model(FLOAT64)
    session, optimizer = build_session(model, dataset=Digits(dtype=FLOAT64), batch=batch)
    gradients: list[torch.Tensor] = []
    handle = optimizer.register_step_pre_hook(
        lambda *_: gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    )
    with session:
        train(session, max_steps=1)
    handle.remove()
    return {"gradient": gradients[0]}


def test_other_boundaries_of_the_same_samples_give_the_same_mean_gradient(tmp_path: Path) -> None:
    wanted = first_step(GlobalBatch(22, micro_batches=4))["gradient"]
    for batch in (GlobalBatch(22), GlobalBatch(22, micro_batches=11)):
        for result in run_workers(first_step, batch, world_size=2, folder=tmp_path):
            assert torch.allclose(result["gradient"], wanted, rtol=1e-12, atol=1e-14)


def moments_at_rest(micro_batches: int, *, num_windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each window's raw moments at fixed weights."""
    session, _ = build_session(
        build_model(FLOAT64),
        dataset=Digits(1797, dtype=FLOAT64),
        lr=0.0,
        num_steps=1e9,
        schedule=None,
        batch=GlobalBatch(24, micro_batches=micro_batches),
        measuring=Measuring(smoothing=0.0),
    )
    variances, sqr_norms = [], []
    with session:
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels))
            result = session.step()
            if result is not None and result.moments is not None:
                variances.append(result.moments.variance)
                sqr_norms.append(result.moments.sqr_norm)
                if len(variances) == num_windows:
                    break
    return np.array(variances), np.array(sqr_norms)


def test_other_boundaries_of_the_same_samples_give_moments_that_agree_in_expectation() -> None:
    few, many = (moments_at_rest(m, num_windows=600) for m in (3, 12))
    for one, other in zip(few, many, strict=True):
        assert not np.allclose(one[:10], other[:10], rtol=1e-3)
        difference = one - other
        assert abs(difference.mean()) < 4 * difference.std() / np.sqrt(len(difference))
    assert few[0].mean() == pytest.approx(many[0].mean(), rel=0.1)


# BC-45
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 3)])
def test_a_run_saved_in_one_world_goes_on_in_another_as_if_nothing_had_happened(
    before: int, after: int, tmp_path: Path
) -> None:
    wanted = train_digits(FLOAT64, max_steps=60)
    first = {"dtype": FLOAT64, "max_steps": 30, "save": tmp_path / "saved"}
    second = {"dtype": FLOAT64, "max_steps": 30, "state": tmp_path / "saved"}
    run_workers(train_with, first, world_size=before, folder=tmp_path)
    records = run_workers(train_with, second, world_size=after, folder=tmp_path)
    assert_ranks_equal(records)
    rest = {name: wanted[name][30:] for name in (*NUMBERS, "position")}
    assert_same(records[0], rest | {"weights": wanted["weights"]}, rel=1e-10)


def test_a_run_saved_and_resumed_in_the_same_world_is_equal_to_the_bit(tmp_path: Path) -> None:
    # DDP regroups its buckets after a first step unless it looks for unused parameters; with
    # other buckets the last digit of a norm, and so of the gain, may differ in that one step.
    keywords = {"ddp": {"find_unused_parameters": True}}
    whole = run_workers(train_with, keywords | {"max_steps": 40}, world_size=2, folder=tmp_path)
    first = keywords | {"max_steps": 20, "save": tmp_path / "saved"}
    second = keywords | {"max_steps": 20, "state": tmp_path / "saved"}
    run_workers(train_with, first, world_size=2, folder=tmp_path)
    records = run_workers(train_with, second, world_size=2, folder=tmp_path)
    assert torch.equal(records[0]["weights"], whole[0]["weights"])
    assert records[0]["gain"] == whole[0]["gain"][20:]


# BC-31 BC-42
def test_position_progress_and_lr_go_on_with_the_batch_of_each_world(tmp_path: Path) -> None:
    # mala #374: from 1 worker to 4, 2 and 1 again, linear rule: lr 1x, 4x, 2x, 1x its base.
    lrs = []
    state = None
    for number, world_size in enumerate([1, 4, 2, 1]):
        keywords = {"max_steps": 3, "batch": LocalBatch(8), "save": tmp_path / f"{number}"}
        keywords |= {"state": state, "rule": linear, "compensation": None}
        record = run_workers(train_with, keywords, world_size=world_size, folder=tmp_path)[0]
        state = tmp_path / f"{number}"
        lrs.append(record["lr"][0] / 0.9995 ** (record["progress"][0] - world_size))
    assert lrs == pytest.approx([0.02, 0.08, 0.04, 0.02])
    assert record["position"][-1] == 8 * 3 * (1 + 4 + 2 + 1)
    assert record["progress"][-1] == 3 * (1 + 4 + 2 + 1)


def test_what_a_lone_worker_measured_is_the_first_gain_of_two_and_the_same_on_both(
    tmp_path: Path,
) -> None:
    alone = {"batch": LocalBatch(8), "max_steps": 30, "save": tmp_path / "saved"}
    [first] = run_workers(train_with, alone, world_size=1, folder=tmp_path)
    assert set(first["gain"]) == {1.0}  # at the base batch
    together = {"batch": LocalBatch(8), "max_steps": 4, "state": tmp_path / "saved"}
    left, right = run_workers(train_with, together, world_size=2, folder=tmp_path)
    assert left["gain"] == right["gain"]
    assert torch.equal(left["weights"], right["weights"])
    assert all(1.02 < gain < 2 for gain in left["gain"])


def linear(now: Any) -> tuple[float, float]:
    return now.scale, now.scale


def noisy_line() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(1000, 1, generator=generator) * 2 - 1
    return inputs, 3 + 4 * inputs + torch.randn(1000, 1, generator=generator)


def fit_a_line(keywords: dict[str, Any]) -> dict[str, Any]:
    inputs, targets = noisy_line()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = Session(
        model,
        optimizer=optimizer,
        dataset=TensorDataset(inputs, targets),
        base_batch_size=32,
        num_epochs=60,
        batch=LocalBatch(32, micro_batches=2),
        progress_bar=False,
    )
    parts = {"model": session.model, "optimizer": optimizer, "session": session}
    if keywords["state"] is not None:
        for name, state in torch.load(keywords["state"], weights_only=True).items():
            parts[name].load_state_dict(state)
    with session:
        for x, y in session:
            session.backward((session.model(x) - y).square().mean())
            result = session.step()
            if result is not None and result.progress >= keywords["until"]:
                break
        if session.world.rank == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save(states, keywords["save"])
    return {"slope": model.weight.item(), "intercept": model.bias.item()}


@pytest.mark.parametrize("worlds", [[2], [4], [1, 4, 2]], ids=str)
def test_linear_regression_finds_its_coefficients_in_any_worlds(
    worlds: list[int], tmp_path: Path
) -> None:
    state = None
    for number, world_size in enumerate(worlds, start=1):
        until = 1920 * number / len(worlds)
        keywords = {"state": state, "save": tmp_path / f"{number}", "until": until}
        records = run_workers(fit_a_line, keywords, world_size=world_size, folder=tmp_path)
        state = tmp_path / f"{number}"
    inputs, targets = noisy_line()
    design = torch.cat([inputs, torch.ones_like(inputs)], 1)
    slope, intercept = torch.linalg.lstsq(design, targets).solution[:, 0].tolist()
    for record in records:
        assert record["slope"] == pytest.approx(slope, abs=0.1)
        assert record["intercept"] == pytest.approx(intercept, abs=0.1)


class Branches(nn.Module):
    """A model with a frozen layer, a shared one, and a branch that one rank alone takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.shared = nn.Linear(16, 16)
        self.rare = nn.Linear(16, 16)
        self.last = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.shared(torch.tanh(self.frozen(torch.tanh(self.first(images))))))
        if bool((indices % 7 == 0).any()):
            hidden = hidden + torch.tanh(self.rare(hidden))
        return self.last(torch.tanh(self.shared(hidden)))


def train_branches() -> dict[str, Any]:
    model = Branches().double()
    session, _ = build_session(
        model,
        dataset=Digits(dtype=FLOAT64),
        batch=GlobalBatch(16, micro_batches=4),
        lr=0.02,
        num_steps=1e9,
        schedule=None,
        ddp={"find_unused_parameters": True, "bucket_cap_mb": 0.002},
    )
    gains = []
    with session:
        for images, labels, indices in session:
            session.backward(F.cross_entropy(session.model(images, indices), labels))
            result = session.step()
            if result is not None:
                gains.append(result.gain)
                if len(gains) == 60:
                    break
    return {
        "gain": gains,
        "weights": weights_of(model),
    }


def test_frozen_shared_and_unused_parameters_are_averaged_as_in_one_process(tmp_path: Path) -> None:
    wanted = train_branches()
    for record in run_workers(train_branches, world_size=2, folder=tmp_path):
        assert record["gain"] == pytest.approx(wanted["gain"], rel=1e-9)
        assert torch.allclose(record["weights"], wanted["weights"], rtol=0, atol=1e-10)


def train_with_nan_on_one_rank(scaled: bool) -> dict[str, Any]:
    model = build_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    session, optimizer = build_session(model, batch=GlobalBatch(16), scaler=scaler, num_steps=40)
    rows = []
    with session:
        for number, (images, labels, _) in enumerate(session):
            loss = F.cross_entropy(session.model(images), labels)
            if number in (3, 4) and session.world.rank == 1:
                loss = loss * float("inf")
            session.backward(loss)
            result = session.step()
            assert result is not None
            rows.append((result.skipped, result.step, result.progress, result.position))
    return {
        "rows": rows,
        "scale": scaler.get_scale() if scaler else None,
        "lr": optimizer.param_groups[0]["lr"],
        "weights": weights_of(model),
    }


# BC-04
@pytest.mark.parametrize("scaled", [False, True])
def test_infinite_gradients_on_one_rank_make_every_rank_skip_the_step(
    scaled: bool, tmp_path: Path
) -> None:
    first, second = run_workers(train_with_nan_on_one_rank, scaled, world_size=2, folder=tmp_path)
    assert [row[0] for row in first["rows"][:6]] == [False, False, False, True, True, False]
    assert first["rows"] == second["rows"]
    assert first["rows"][4][1:] == first["rows"][2][1:]
    assert first["scale"] == second["scale"] == (2.0**8 if scaled else None)
    assert torch.equal(first["weights"], second["weights"])
    assert torch.isfinite(first["weights"]).all()


def train_tokens() -> dict[str, Any]:
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(0.1)
    inputs = torch.randn(48, 3, dtype=FLOAT64, generator=torch.Generator().manual_seed(0))
    session = Session(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        dataset=TensorDataset(inputs, torch.arange(48)),
        base_batch_size=4,
        num_steps=1e9,
        batch=GlobalBatch(12, micro_batches=4),
        loader=LoaderOptions(seed=1),
        progress_bar=False,
    )
    results = []
    with session:
        for batch, indices in session:
            tokens = (indices % 5 + 1).double()
            loss = ((session.model(batch)[:, 0] - 1).square() * tokens).sum() / tokens.sum()
            session.backward(loss, weight=tokens.sum().item())
            result = session.step()
            if result is not None:
                results.append(result)
                if len(results) == 40:
                    break
    return {
        "gain": [result.gain for result in results],
        "loss": [result.loss for result in results],
        "weight": [result.weight for result in results],
        "weights": model.weight.detach().clone(),
    }


# BC-26
def test_token_weights_average_over_the_tokens_of_all_workers(tmp_path: Path) -> None:
    wanted = train_tokens()
    for record in run_workers(train_tokens, world_size=2, folder=tmp_path):
        for name in ("gain", "loss", "weight"):
            assert record[name] == pytest.approx(wanted[name], rel=1e-10), name
        assert torch.allclose(record["weights"], wanted["weights"], rtol=1e-10)


def unfreeze_later(change: str) -> dict[str, Any]:
    model = build_model(FLOAT64)
    model[0].requires_grad_(change != "unfreeze")
    groups = list(model.parameters()) if change == "unfreeze" else list(model[2].parameters())
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    session = session_over(
        model,
        optimizer=optimizer,
        dataset=Digits(dtype=FLOAT64),
        num_steps=1e9,
        batch=GlobalBatch(24, micro_batches=4),
        loader=LoaderOptions(seed=3),
    )
    gains = []
    with session:
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels))
            result = session.step()
            if result is None:
                continue
            gains.append(result.gain)
            if len(gains) == 5 and change == "unfreeze":
                model[0].requires_grad_(True)
            if len(gains) == 5 and change == "join":
                optimizer.add_param_group({"params": model[0].parameters()})
            if len(gains) == 10 and change == "unfreeze":
                model[2].requires_grad_(False)
            if len(gains) == 20:
                break
    weights = weights_of(model)
    return {"gain": gains, "weights": weights}


@pytest.mark.parametrize("change", ["unfreeze", "join"])
def test_parameters_that_are_unfrozen_or_join_later_are_averaged_over_the_workers(
    change: str, tmp_path: Path
) -> None:
    wanted = unfreeze_later(change)
    records = run_workers(unfreeze_later, change, world_size=2, folder=tmp_path)
    assert torch.equal(records[0]["weights"], records[1]["weights"])
    assert records[0]["gain"] == pytest.approx(wanted["gain"], rel=1e-9)
    assert torch.allclose(records[0]["weights"], wanted["weights"], rtol=0, atol=1e-10)


def start_unequal(kind: str, saved: Path) -> str:
    rank = dist.get_rank()
    options: dict[str, Any] = {"batch": GlobalBatch(16)}
    if kind == "seed":
        options["loader"] = LoaderOptions(seed=rank)
    if kind == "samples":
        options["dataset"] = Digits(301 - 4 * rank)
    if kind == "num_steps":
        options |= {"num_steps": 100 + rank, "schedule": None}
    if kind == "learning rates":
        options |= {"lr": 0.1 + 0.1 * rank}
    if kind == "state":
        options["schedule"] = lambda progress: 0.9995**progress
    if kind == "policy":
        options["batch"] = GlobalBatch(16 + 2 * rank)
    session, _ = build_session(build_model(), **options)
    if kind == "state" and rank == 0:
        session.load_state_dict(torch.load(saved, weights_only=True)["session"])
    try:
        with session:
            train(session, max_steps=2)
    except StateError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("seed", "seed="),
        ("samples", "num_samples="),
        ("num_steps", "num_steps="),
        ("learning rates", "learning rates="),
        ("policy", "end of the next batch="),
        ("state", "progress="),
    ],
)
def test_workers_that_start_from_different_things_are_told_which(
    kind: str, named: str, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    train_digits(num_steps=200, max_steps=3, save=saved, batch=GlobalBatch(16, micro_batches=2))
    for message in run_workers(start_unequal, kind, saved, world_size=2, folder=tmp_path):
        assert message.startswith("the workers differ in what must be the same on all")
        assert named in message


def evaluate_different_names() -> str:
    session, _ = build_session(build_model())
    name = f"rank {dist.get_rank()}"
    try:
        with session:
            session.evaluate(lambda model, batch: {name: 1}, Digits(10))  # noqa: ARG005
    except StateError as error:
        return str(error)
    return "no error"


def test_evaluations_of_different_quantities_are_not_added_up(tmp_path: Path) -> None:
    for message in run_workers(evaluate_different_names, world_size=2, folder=tmp_path):
        assert "names of the sums" in message


def fail_to_evaluate_on_one_rank() -> str:
    session, _ = build_session(build_model(), batch=GlobalBatch(16))

    def fail(model: nn.Module, batch: Any) -> dict[str, int]:  # noqa: ARG001
        if dist.get_rank() == 1:
            raise ZeroDivisionError
        return {"ones": 1}

    with session:
        try:
            session.evaluate(fail, Digits(10))
        except (ZeroDivisionError, StateError) as error:
            name = type(error).__name__
        train(session, max_steps=2)
    return name


def test_an_evaluation_that_fails_on_one_worker_fails_on_all_and_training_can_go_on(
    tmp_path: Path,
) -> None:
    names = run_workers(fail_to_evaluate_on_one_rank, world_size=2, folder=tmp_path)
    assert names == ["StateError", "ZeroDivisionError"]


def bypass_the_sessions_model() -> str:
    model = build_model()
    session, _ = build_session(model, batch=GlobalBatch(16))
    try:
        with session:
            for images, labels, _ in session:
                session.backward(F.cross_entropy(model(images), labels))
                session.step()
    except UsageError as error:
        return str(error)
    return "no error"


def test_computing_the_loss_with_the_bare_model_is_named(tmp_path: Path) -> None:
    for message in run_workers(bypass_the_sessions_model, world_size=2, folder=tmp_path):
        assert "compute the loss with session.model" in message


def evaluate_with_batch_norm() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).double()
    session, _ = build_session(model, dataset=Digits(dtype=FLOAT64), batch=LocalBatch(8))
    with session:
        train(session, max_steps=15)
        own = [model[1].running_mean.clone(), model[1].running_var.clone()]
        result = session.evaluate(loss_sum, Digits(100, dtype=FLOAT64), batch_size=10)
    merged = [model[1].running_mean.clone(), model[1].running_var.clone()]
    model.eval()
    images = torch.stack([image for image, _, _ in Digits(100, dtype=FLOAT64)])
    labels = torch.tensor([label for _, label, _ in Digits(100, dtype=FLOAT64)])
    alone = F.cross_entropy(model(images), labels).item()
    return {"own": own, "merged": merged, "mean": result.mean("loss"), "alone": alone}


def loss_sum(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="sum")}


def test_evaluation_merges_batch_statistics_so_that_all_workers_hold_one_model(
    tmp_path: Path,
) -> None:
    first, second = run_workers(evaluate_with_batch_norm, world_size=2, folder=tmp_path)
    assert not torch.allclose(first["own"][0], second["own"][0])
    for record in (first, second):
        assert record["mean"] == pytest.approx(record["alone"], rel=1e-12)
    means = torch.stack([first["own"][0], second["own"][0]])
    variances = torch.stack([first["own"][1], second["own"][1]])
    assert torch.allclose(first["merged"][0], means.mean(0))
    assert torch.allclose(first["merged"][1], variances.mean(0) + means.var(0, unbiased=False))
    assert torch.equal(first["merged"][1], second["merged"][1])


def leave_a_layer_unused() -> str:
    model = nn.ModuleDict({"used": nn.Linear(64, 10), "unused": nn.Linear(3, 2)})
    model.forward = lambda images: model["used"](images)
    session, _ = build_session(model, batch=GlobalBatch(16))
    try:
        with session:
            train(session)
    except UsageError as error:
        return str(error)
    return "no error"


def test_unused_parameters_are_named_with_the_way_out(tmp_path: Path) -> None:
    for message in run_workers(leave_a_layer_unused, world_size=2, folder=tmp_path):
        assert message.startswith("backward did not reach 2 of 4 parameters (shapes (2, 3), (2,))")
        assert "ddp={'find_unused_parameters': True}" in message


def train_with_adam() -> dict[str, Any]:
    model = build_model(FLOAT64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = session_over(
        model,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200),
        dataset=Digits(dtype=FLOAT64),
        num_steps=200,
        rule=AdamScale(),
        batch=GlobalBatch(32, micro_batches=4),
    )
    with session:
        return train(session)


# BC-17
def test_adam_with_the_square_root_of_the_gain_trains_alike_in_any_world(tmp_path: Path) -> None:
    wanted = train_with_adam()
    records = run_workers(train_with_adam, world_size=2, folder=tmp_path)
    assert_ranks_equal(records)
    assert_same(records[0], wanted, rel=1e-9)


def four_layers(policy: Any) -> tuple[list[float], float]:
    sizes = [2, 3, 4, 5, 6]
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))).double()
    inputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]], dtype=FLOAT64)
    with torch.no_grad():
        for layer in model:
            ramp = torch.arange(layer.weight.numel(), dtype=FLOAT64)
            layer.weight.copy_((ramp / ramp.mean()).view_as(layer.weight))
    session = Session(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=TensorDataset(inputs),
        base_batch_size=1,
        num_steps=1e9,
        batch=policy,
        measuring=Measuring(current=True, smoothing=1 - 2 / 1000),
        loader=LoaderOptions(shuffle=False),
        progress_bar=False,
    )
    gains = []
    with session:
        for (batch,) in session:
            session.backward(session.model(batch).sum())
            result = session.step()
            if result is not None:
                gains.append(result.gain)
            if len(gains) == 2:
                break
    return gains, float(np.mean([layer.weight.mean().item() for layer in model]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_four_layers_give_fairscales_gain_and_weights(world_size: int, tmp_path: Path) -> None:
    batch = LocalBatch(2 // world_size, micro_batches=2 // world_size)
    for gains, mean_weight in run_workers(
        four_layers, batch, world_size=world_size, folder=tmp_path
    ):
        assert gains[1] == pytest.approx(1.0335265132125744, rel=1e-6)
        assert mean_weight == pytest.approx(52.92657661437988, rel=1e-6)


def train_idle_third(_: int = 0) -> dict[str, Any]:
    return train_digits(
        FLOAT64, max_steps=40, batch=GlobalBatch(16, micro_batches=2, allow_idle_workers=True)
    )


# BC-58
def test_an_idle_worker_counts_neither_in_the_gain_nor_in_the_mean(tmp_path: Path) -> None:
    wanted = train_digits(FLOAT64, max_steps=40, batch=GlobalBatch(16, micro_batches=2))
    records = run_workers(train_idle_third, world_size=3, folder=tmp_path)
    assert [weight for _, weight in records[2]["seen"]] == [0] * 40
    assert_ranks_equal(records)
    assert_same(records[0], wanted, rel=1e-10)
    assert max(wanted["gain"]) > 1.1


def train_under_one_cycle(keywords: dict[str, Any]) -> dict[str, Any]:
    model = build_model(FLOAT64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=150)
    session = session_over(
        model,
        optimizer=optimizer,
        schedule=schedule,
        dataset=Digits(dtype=FLOAT64),
        num_steps=150,
        batch=GlobalBatch(24, micro_batches=4),
    )
    parts = {"model": session.model, "optimizer": optimizer, "session": session}
    if keywords["state"] is not None:
        for name, state in torch.load(keywords["state"], weights_only=True).items():
            parts[name].load_state_dict(state)
    with session:
        record = train(session, max_steps=keywords["max_steps"])
        if session.world.rank == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save(states, keywords["save"])
    record["final"] = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]
    return record


# BC-33
def test_one_cycle_goes_on_through_worlds_and_ends_at_its_final_lr(tmp_path: Path) -> None:
    alone = {"state": None, "save": tmp_path / "whole", "max_steps": None}
    wanted = train_under_one_cycle(alone)
    state, lrs = None, []
    for number, (world_size, max_steps) in enumerate([(1, 15), (4, 20), (2, None)]):
        keywords = {"state": state, "save": tmp_path / f"{number}", "max_steps": max_steps}
        arguments = {"world_size": world_size, "folder": tmp_path}
        record = run_workers(train_under_one_cycle, keywords, **arguments)[0]
        state = tmp_path / f"{number}"
        lrs += record["lr"]
    assert lrs == pytest.approx(wanted["lr"], rel=1e-8)
    assert record["final"] == pytest.approx((0.1 / 25 / 1e4, 0.95))
    assert torch.allclose(record["weights"], wanted["weights"], rtol=0, atol=1e-9)


def evaluate_few(num_samples: int) -> dict[str, Any]:
    session, _ = build_session(build_model())
    with session:
        result = session.evaluate(
            lambda model, batch: {"indices": batch[2].sum(), "calls": 1},  # noqa: ARG005
            Digits(num_samples),
            batch_size=4,
        )
    return {"sums": result.sums, "num_samples": result.num_samples}


# BC-53
@pytest.mark.parametrize("num_samples", [1, 2, 10])
def test_evaluation_deals_each_sample_once_without_padding(
    num_samples: int, tmp_path: Path
) -> None:
    for result in run_workers(evaluate_few, num_samples, world_size=3, folder=tmp_path):
        assert result["sums"]["indices"] == sum(range(num_samples))
        assert result["num_samples"] == num_samples


def train_idle() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).double()
    session, _ = build_session(
        model,
        dataset=Digits(dtype=FLOAT64),
        batch=GlobalBatch(2, allow_idle_workers=True),
        rule=linear,
        num_steps=1e9,
        schedule=None,
    )
    with session:
        record = train(session, max_steps=5)
    record["statistics"] = model[1].running_mean.clone()
    return record


# BC-58
def test_a_worker_without_samples_keeps_company_and_leaves_no_trace(tmp_path: Path) -> None:
    records = run_workers(train_idle, world_size=2, folder=tmp_path)
    wanted = train_idle()
    assert [weight for _, weight in records[1]["seen"]] == [0] * 5
    assert torch.allclose(records[0]["weights"], wanted["weights"], rtol=1e-10)
    assert torch.equal(records[0]["weights"], records[1]["weights"])
    assert torch.equal(records[1]["statistics"], torch.zeros(8, dtype=FLOAT64))


def stop_on_rank_one() -> int:
    session, _ = build_session(build_model(), batch=GlobalBatch(16))
    with session:
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels))
            result = session.step()
            assert result is not None
            if result.step == 5 and session.world.rank == 1:
                session.stop()
    return result.step


def test_one_worker_that_stops_stops_all_after_the_same_step(tmp_path: Path) -> None:
    assert run_workers(stop_on_rank_one, world_size=3, folder=tmp_path) == [6, 6, 6]


def lose_a_peer(at_step: int, ddp: dict[str, Any], own: bool) -> str:
    model = build_model()
    session, _ = build_session(model, batch=GlobalBatch(16), ddp=ddp)
    reached, position = "nothing", -1
    before = after = torch.zeros(0)
    try:
        with session:
            for images, labels, _ in session:
                position = session.position
                if position == 16 * at_step and session.world.rank == 1:
                    os._exit(0)
                before = weights_of(model)
                loss = F.cross_entropy(session.model(images), labels)
                if own:
                    session.backward(loss)
                else:
                    loss.backward()
                reached = "backward returned"
                session.step()
                reached = "step returned"
    except CommunicationError as error:
        after = weights_of(model)
        assert torch.equal(before, after)
        assert session.position == position == 16 * at_step
        return f"{reached}; {str(error)[:40]}"
    return "no error"


@pytest.mark.parametrize("at_step", [0, 1, 2, 5])
@pytest.mark.parametrize(
    ("ddp", "own"),
    [({}, False), ({}, True), ({"find_unused_parameters": True}, True)],
    ids=["loss.backward", "session.backward", "find unused"],
)
def test_a_peers_death_is_raised_by_step_and_not_in_the_users_forward_or_backward(
    at_step: int, ddp: dict[str, Any], own: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="result-1"):
        run_workers(lose_a_peer, at_step, ddp, own, world_size=2, folder=folder)
    (result,) = folder.glob("*/result-0")
    assert torch.load(result).startswith("backward returned; the process group broke")


def train_with_loader_processes(num_workers: int) -> dict[str, Any]:
    return train_digits(max_steps=20, loader=LoaderOptions(seed=3, num_workers=num_workers))


def test_loader_processes_of_an_open_group_change_nothing(tmp_path: Path) -> None:
    with_processes = run_workers(train_with_loader_processes, 1, world_size=2, folder=tmp_path)
    without = run_workers(train_with_loader_processes, 0, world_size=2, folder=tmp_path)
    for one, other in zip(with_processes, without, strict=True):
        assert one["seen"] == other["seen"]
        assert torch.equal(one["weights"], other["weights"])


def too_few_samples() -> str:
    from elastane.errors import ArgumentError

    try:
        build_session(build_model(), dataset=Digits(2))
    except ArgumentError as error:
        return str(error)
    return "no error"


def test_fewer_samples_than_workers_are_refused_on_every_rank(tmp_path: Path) -> None:
    for message in run_workers(too_few_samples, world_size=3, folder=tmp_path):
        assert message.startswith("len(dataset)=2: fewer samples than the 3 that 3 workers need")


SCRIPT = """
import sys
import torch
from torch.nn import functional as F
from training import build_model, build_session, train

import torch.distributed as dist

for number in range(3):
    session, _ = build_session(build_model(), num_steps=20, run_dir=f"{sys.argv[1]}/{number}")
    with session:
        record = train(session)
    assert not dist.is_initialized()
    world = session.world
    sys.stdout.write(f"{world.rank} {world.world_size} {record['progress'][-1]}\\n")
    sys.stdout.flush()
"""


def test_the_same_script_runs_under_python_and_torchrun_several_sessions_one_after_the_other(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(script), str(tmp_path / "one")]
    alone = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=True
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    both = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script), str(tmp_path / "two")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    single = [line.split() for line in alone.stdout.splitlines()]
    double = [line.split() for line in both.stdout.splitlines()]
    assert [line[:2] for line in single] == [["0", "1"]] * 3
    assert sorted(line[:2] for line in double) == [["0", "2"]] * 3 + [["1", "2"]] * 3
    for line in double:
        assert float(line[2]) == pytest.approx(float(single[0][2]), rel=1e-4)
    for number in range(3):
        kinds = Counter(event["event"] for event in read_events(tmp_path / "two" / str(number)))
        assert kinds["start"] == kinds["end"] == 1


def group_left_open() -> bool:
    session, _ = build_session(build_model(), batch=GlobalBatch(16), num_steps=10)
    with session:
        train(session)
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item() == 2


def test_a_group_that_the_user_opened_is_used_and_left_open(tmp_path: Path) -> None:
    assert run_workers(group_left_open, world_size=2, folder=tmp_path) == [True, True]
