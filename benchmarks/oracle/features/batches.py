"""Features of the batch: how it is cut, dealt, weighted, and how often it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.oracle.features.feature import Feature, Record, grid_of
from benchmarks.oracle.job import Batch, Job
from benchmarks.oracle.subject import Form, Turn
from elastane import GlobalBatch, LocalBatch
from elastane.batching import World

__all__ = ["FEATURES"]


@dataclass(frozen=True, slots=True)
class _Changing:
    """A user's own policy: uneven shares, cut into other numbers of micro-batches each step."""

    samples: int = 48

    def batch_samples(self, world_size: int) -> int:  # noqa: ARG002
        """Return the batch."""
        return self.samples

    def num_parts(self, world_size: int) -> int:
        """Return the number of workers."""
        return world_size

    def deal(
        self, start: int, stop: int, *, world: World, min_samples: int
    ) -> Sequence[tuple[int, int]]:
        """Return 2 to 4 micro-batches; each worker has another share and another number."""
        turn = start // self.samples
        shares = [2 + (rank + turn) % 3 for rank in range(world.world_size)]
        begin, end = _cut(start, stop, shares)[world.rank]
        number = min(2 + (turn + world.rank) % 3, (end - begin) // min_samples)
        return _cut(begin, end, range(1, number + 1))


def _cut(start: int, stop: int, shares: Sequence[int]) -> list[tuple[int, int]]:
    """Return the parts of a range that are in proportion to the shares."""
    ends = [start + (stop - start) * done // sum(shares) for done in accumulate(shares)]
    return list(pairwise((start, *ends)))


def _tokens(batch: Batch) -> Tensor:
    """Return how many tokens each sample stands for."""
    return batch[2] % 5 + 1


def _token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss over tokens."""
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (each * _tokens(batch)).sum() / _tokens(batch).sum()


def _num_tokens(batch: Batch) -> float:
    return float(_tokens(batch).sum())


def _weighted(turn: Turn) -> None:
    turn.session.backward(turn.loss(), weight=_num_tokens(turn.batch))


def _summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum that the mean over tokens is made of."""
    return _token_loss(model, batch) * _num_tokens(batch)


def _summed(turn: Turn) -> None:
    loss = _summed_loss(turn.session.model, turn.batch)
    turn.session.backward(loss, weight=_num_tokens(turn.batch), reduction="sum")


def _plain_backward(turn: Turn) -> None:
    turn.loss().backward()


def _sizes(records: Sequence[Record]) -> set[int]:
    """Return how many samples the windows had over all ranks."""
    each = zip(*(record["windows"] for record in records), strict=True)
    return {sum(len(m) for one in ranks for m in one["micro_batches"]) for ranks in each}


def _counts(records: Sequence[Record]) -> set[int]:
    """Return how many micro-batches ranks made in a window."""
    return {len(window["micro_batches"]) for record in records for window in record["windows"]}


def _is_short(records: Sequence[Record]) -> bool:
    return _sizes(records) == {32, 13}


FEATURES = (
    Feature(name="plain"),
    Feature(name="plain, loss.backward()", form=Form(batch=grid_of(4), turn=_plain_backward)),
    Feature(
        name="global batch, even", form=Form(batch=lambda _: GlobalBatch(32)), worlds=((2,), (4,))
    ),
    Feature(
        name="global batch, uneven shares",
        form=Form(batch=lambda n: GlobalBatch(30, shares=(3, 2, 2, 1)[:n])),
        worlds=((2,), (4,)),
    ),
    Feature(
        name="global batch, worker without samples",
        form=Form(batch=lambda _: GlobalBatch(3, allow_idle_workers=True)),
        job=Job(num_samples=321),
        worlds=((4,),),
    ),
    Feature(name="local batch", form=Form(batch=lambda _: LocalBatch(8)), worlds=((2,), (4,))),
    Feature(
        name="accumulation, A=2",
        form=Form(batch=lambda _: LocalBatch(16, micro_batches=2)),
        happened=lambda records: _counts(records) == {2},
    ),
    Feature(
        name="accumulation, A=3",
        form=Form(batch=lambda _: LocalBatch(18, micro_batches=3)),
        happened=lambda records: 3 in _counts(records),
    ),
    Feature(
        name="accumulation, another A each step and rank",
        form=Form(batch=lambda _: _Changing()),
        job=Job(num_samples=336),
        happened=lambda records: _counts(records) == {2, 3, 4},
    ),
    Feature(
        name="accumulation, 7 micro-batches dealt whole",
        form=Form(batch=grid_of(7)),
        happened=lambda records: sum(_counts(records[:1])) >= 2,
    ),
    Feature(name="short last batch", job=Job(num_samples=301), happened=_is_short),
    Feature(
        name="token weights",
        form=Form(batch=grid_of(4), turn=_weighted),
        job=Job(loss=_token_loss, weight=_num_tokens),
    ),
    Feature(
        name="token weights, uneven shares",
        form=Form(batch=lambda n: GlobalBatch(30, shares=(3, 2, 2, 1)[:n]), turn=_weighted),
        job=Job(loss=_token_loss, weight=_num_tokens, num_samples=301),
        worlds=((2,), (4,)),
    ),
    Feature(
        name="summed loss",
        form=Form(batch=lambda _: LocalBatch(18, micro_batches=4), turn=_summed),
        job=Job(loss=_token_loss, weight=_num_tokens),
    ),
    Feature(name="measured every third step", job=Job(measured_every=3)),
    Feature(
        name="change of workers, local batch",
        form=Form(batch=lambda _: LocalBatch(12, micro_batches=2)),
        worlds=((1, 2, 4, 3),),
    ),
    Feature(name="change of workers, global batch", worlds=((1, 2, 4, 3),)),
)
