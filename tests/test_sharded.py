"""Sharded models train what one process trains: the same gain, moments, norms and weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_job import (
    DIGITS,
    FLOAT64,
    build,
    mesh_of,
    oracle,
    session_of,
    shard,
    train,
    weights_of,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import Subset
from workers import run_workers

from elastane import GlobalBatch, LocalBatch, Measuring
from elastane.errors import UnsupportedError

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

STEPS, FEW = 50, 15
BOUND = 1e-5
POLICIES: dict[str, Any] = {
    "one micro-batch each": LocalBatch(8),
    "unequal micro-batches": GlobalBatch(22),
    "another number of micro-batches on each": GlobalBatch(26, micro_batches=5),
    "accumulated": LocalBatch(8, micro_batches=3),
}
MAX_NORM = 0.35


def tokens_in(labels: torch.Tensor) -> float:
    return float(labels.sum()) + 1


# What the workers do: all cases of one way to shard, in one set of processes


def train_all(kind: str, world_size: int) -> dict[str, Any]:
    make, ddp = Maker(kind, world_size), Maker("ddp", world_size)
    records = {name: make.trained(STEPS, batch=policy) for name, policy in POLICIES.items()}
    records["DDP"] = ddp.trained(STEPS)
    records["clipped"] = make.trained(FEW, max_norm=MAX_NORM)
    records["tokens"] = make.trained(FEW, weight_of=tokens_in)
    grouped = {"groups": True, "measuring": Measuring(per="param_group", every=2)}
    records["groups"] = make.trained(FEW, **grouped)
    records["groups, DDP"] = ddp.trained(FEW, **grouped)
    records["infinite"] = train_with_inf(make, scaler=None)
    records["infinite, scaled"] = train_with_inf(make, scaler=torch.amp.GradScaler("cpu", 64.0))
    records["unfrozen"] = train_unfreezing(make)
    records["unfrozen, DDP"] = train_unfreezing(ddp)
    records["called twice"] = train_twice(make)
    records["called twice, DDP"] = train_twice(ddp)
    records["evaluated"] = evaluate(make)
    records["norms"] = norms_by_hand(make)
    records["afterwards"] = gradient_after_the_session(make)
    records["in parts"] = refused_in_parts(make)
    return records


class Maker:
    """Builds models of one kind, each rank another one before they are sharded or wrapped."""

    def __init__(self, kind: str, world_size: int) -> None:
        self.kind, self.world_size = kind, world_size

    def model(self) -> nn.Module:
        model = build(seed=0 if self.kind == "fsdp" or dist.get_rank() < 2 else 5)
        if self.kind == "ddp":
            return model
        return shard(model, self.kind, world_size=self.world_size)

    def trained(
        self,
        steps: int,
        *,
        weight_of: Callable[..., float] | None = None,
        groups: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        model = self.model()
        session, _ = session_of(model, groups=groups, **options)
        with session:
            return train(session, steps=steps, weight_of=weight_of)


def train_with_inf(make: Maker, *, scaler: torch.amp.GradScaler | None) -> dict[str, Any]:
    """Have the last rank's loss overflow in the third step."""
    model = make.model()
    session, _ = session_of(model, scaler=scaler)
    rows = []
    with session:
        for images, labels, _ in session:
            loss = F.cross_entropy(session.model(images), labels)
            if len(rows) == 2 and dist.get_rank() == make.world_size - 1:
                loss = loss * float("inf")
            session.backward(loss)
            result = session.step()
            moved = weights_of(model)
            rows.append((result.skipped, result.position, result.gain, moved))
            if len(rows) == 5:
                break
    return {
        "skipped": [row[0] for row in rows],
        "position": [row[1] for row in rows],
        "gain": [row[2] for row in rows],
        "weights": torch.stack([row[3] for row in rows]),
        "scale": None if scaler is None else scaler.get_scale(),
    }


def train_unfreezing(make: Maker) -> dict[str, Any]:
    model = make.model()
    model[0].requires_grad_(False)
    session, _ = session_of(model)
    with session:
        train(session, steps=5)
        model[0].requires_grad_(True)
        return train(session, steps=10)


def evaluate(make: Maker) -> dict[str, Any]:
    """Evaluate where one rank has more batches than another, then train on."""
    session, _ = session_of(make.model())

    def count(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        images, labels, _ = batch
        loss = F.cross_entropy(model(images), labels, reduction="sum")
        return {"loss": loss, "seen": torch.tensor(len(labels))}

    with session:
        size = 301 // make.world_size
        sums = session.evaluate(count, DIGITS, batch_size=size).sums
        few = session.evaluate(count, Subset(DIGITS, range(make.world_size - 1))).sums
        train(session, steps=2)
    return {"sums": sums, "few": few}


def norms_by_hand(make: Maker) -> list[tuple[float, float]]:
    """Clip by hand after the last backward: torch's norm, and the session's."""
    model = make.model()
    session, _ = session_of(model, batch=LocalBatch(8, micro_batches=2))
    found = []
    with session:
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels))
            norm = 0.0
            if session.is_last_micro_batch:
                norm = clip_grad_norm_(model.parameters(), 0.1).full_tensor().item()
            result = session.step()
            if result is not None:
                found.append((norm, result.grad_norm))
                if len(found) == 3:
                    return found
    return found


def gradient_after_the_session(make: Maker) -> torch.Tensor:
    """Train a step, leave the session, and take a gradient with the sharded model alone."""
    model = make.model()
    session, _ = session_of(model)
    with session:
        train(session, steps=1)
    images, label, _ = DIGITS[dist.get_rank()]
    F.cross_entropy(model(images[None]), torch.tensor([label])).backward()
    gradients = [p.grad for p in model.parameters()]
    weights = weights_of(model)
    return torch.stack([weights, torch.cat([g.full_tensor().reshape(-1) for g in gradients])])


class Twice(nn.Module):
    """Calls one of its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 10)
        self.twice = nn.Linear(10, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.twice(torch.tanh(self.twice(torch.tanh(self.first(inputs)))))


def train_twice(make: Maker) -> dict[str, Any]:
    torch.manual_seed(7)
    model: Any = Twice().to(FLOAT64)
    if make.kind != "ddp":
        mesh = mesh_of(make.kind, world_size=make.world_size)
        fully_shard(model.twice, mesh=mesh)
        fully_shard(model, mesh=mesh)
    session, _ = session_of(model)
    with session:
        return train(session, steps=5)


def refused_in_parts(make: Maker) -> str:
    """Call backward twice in a micro-batch."""
    session, _ = session_of(make.model())
    with session:
        for images, labels, _ in session:
            for _ in range(2):
                F.cross_entropy(session.model(images), labels).backward()
            with pytest.raises(UnsupportedError) as error:
                session.step()
            return str(error.value)
    return ""


# What they must find


@pytest.fixture(
    scope="module", params=[("fsdp", 2), ("fsdp", 4), ("hsdp", 4)], ids=lambda p: f"{p[0]}-{p[1]}"
)
def runs(request: Any, tmp_path_factory: Any) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of ranks, and what each of them found."""
    kind, world_size = request.param
    folder: Path = tmp_path_factory.mktemp("sharded")
    records = run_workers(
        train_all, kind, world_size, world_size=world_size, folder=folder, timeout_s=900
    )
    return world_size, records


def relative_error(found: Any, wanted: Any) -> float:
    """Return the largest difference over the largest number that was wanted."""
    found, wanted = (torch.as_tensor(one, dtype=FLOAT64) for one in (found, wanted))
    return float((found - wanted).abs().max() / wanted.abs().max())


def assert_same(record: dict[str, Any], wanted: dict[str, Any], *, bound: float = BOUND) -> None:
    found = {n: relative_error(record[n], wanted[n]) for n in ("gain", "norm", "weights")}
    for place, name in enumerate(("variance", "sqr_norm")):
        pair = [[one[place] for one in which["moments"]] for which in (record, wanted)]
        found[name] = relative_error(*pair)
    print({name: f"{error:.1e}" for name, error in found.items()})
    assert max(found.values()) <= bound, found


def assert_ranks_equal(records: list[dict[str, Any]], case: str) -> None:
    for record in records[1:]:
        for name in ("gain", "moments", "norm", "loss", "progress", "num_gradients"):
            assert record[case][name] == records[0][case][name], name
        assert torch.equal(record[case]["weights"], records[0][case]["weights"])


# BC-08
@pytest.mark.parametrize("case", POLICIES)
def test_a_sharded_model_has_the_gain_moments_and_weights_of_one_process(
    runs: Any, case: str
) -> None:
    # BC-08: each rank holds a slice. BC-09: over which group what is summed.
    world_size, records = runs
    wanted = oracle(POLICIES[case], world_size=world_size, steps=STEPS)
    assert max(wanted["gain"]) > 1.2
    assert_same(records[0][case], wanted)
    assert_ranks_equal(records, case)


# BC-09
def test_a_sharded_model_is_clipped_by_the_norm_of_the_whole_gradient(runs: Any) -> None:
    world_size, records = runs
    wanted = oracle(LocalBatch(8), world_size=world_size, steps=FEW, max_norm=MAX_NORM)
    assert sum(norm > MAX_NORM for norm in wanted["norm"]) > 5
    assert_same(records[0]["clipped"], wanted)
    assert_ranks_equal(records, "clipped")


def test_weights_other_than_samples_average_a_sharded_model_too(runs: Any) -> None:
    world_size, records = runs
    wanted = oracle(LocalBatch(8), world_size=world_size, steps=FEW, weight_of=tokens_in)
    assert_same(records[0]["tokens"], wanted)
    assert_ranks_equal(records, "tokens")


@pytest.mark.parametrize(
    ("case", "plain"),
    [
        ("one micro-batch each", "DDP"),
        ("groups", "groups, DDP"),
        ("unfrozen", "unfrozen, DDP"),
        ("called twice", "called twice, DDP"),
    ],
)
def test_a_sharded_model_trains_as_under_ddp(runs: Any, case: str, plain: str) -> None:
    _, records = runs
    assert_same(records[0][case], records[0][plain], bound=1e-10)
    assert records[0][case]["loss"] == pytest.approx(records[0][plain]["loss"], rel=1e-10)
    assert_ranks_equal(records, case)


@pytest.mark.parametrize("case", ["infinite", "infinite, scaled"])
def test_a_shard_that_is_not_finite_makes_every_rank_skip(runs: Any, case: str) -> None:
    # BC-04 and BC-06, with the infinity in one rank's backward alone.
    world_size, records = runs
    for record in (one[case] for one in records):
        assert record["skipped"] == [False, False, True, False, False]
        assert record["position"] == [8 * world_size * n for n in (1, 2, 2, 3, 4)]
        assert record["gain"] == records[0][case]["gain"]
        assert torch.equal(record["weights"], records[0][case]["weights"])
        assert torch.equal(record["weights"][1], record["weights"][2])
        assert not torch.equal(record["weights"][2], record["weights"][3])
        assert record["weights"].isfinite().all()
        assert record["scale"] == (None if case == "infinite" else 32.0)


def test_ranks_with_fewer_batches_keep_company_in_an_evaluation(runs: Any) -> None:
    world_size, records = runs
    for record in (one["evaluated"] for one in records):
        assert record == records[0]["evaluated"]
        assert record["sums"]["seen"] == 301
        assert record["few"]["seen"] == world_size - 1
    images, labels = zip(*[one[:2] for one in DIGITS], strict=False)
    loss = F.cross_entropy(build()(torch.stack(images)), torch.tensor(labels), reduction="sum")
    assert records[0]["evaluated"]["sums"]["loss"] == pytest.approx(loss.item(), rel=1e-10)


def test_torchs_own_norm_of_the_gradient_is_the_sessions(runs: Any) -> None:
    _, records = runs
    assert len(records[0]["norms"]) == 3
    for by_torch, by_session in records[0]["norms"]:
        assert by_torch == pytest.approx(by_session, rel=1e-12)


def test_after_the_session_fsdp_takes_means_again(runs: Any) -> None:
    world_size, records = runs
    weights, gradient = records[0]["afterwards"]
    model = build()
    parameters = list(model.parameters())
    parts = weights.split([p.numel() for p in parameters])
    with torch.no_grad():
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))
    samples = [DIGITS[rank] for rank in range(world_size)]
    images, labels = torch.stack([one[0] for one in samples]), [one[1] for one in samples]
    wanted = torch.autograd.grad(F.cross_entropy(model(images), torch.tensor(labels)), parameters)
    assert torch.allclose(gradient, torch.cat([g.reshape(-1) for g in wanted]), rtol=1e-10)


def test_a_gradient_that_comes_in_parts_is_refused(runs: Any) -> None:
    _, records = runs
    for record in records:
        assert "reduced twice in one micro-batch" in record["in parts"]
