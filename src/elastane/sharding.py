"""How a model was sharded by `fully_shard`: over which ranks, how often, and in which units.

Knows FSDP2's public face and DTensor; nothing of gradients, steps or sessions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elastane.errors import UnsupportedError

__all__ = [
    "Sharding",
    "is_sharded",
    "local_of",
    "reshard",
    "shard_of",
    "sharding_of",
    "units_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Where the shards of a model lie.

    Attributes:
        mesh: of all parameters: (shard,) or (replicate, shard).
    """

    mesh: DeviceMesh

    @property
    def num_shards(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.mesh.size(-1)

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return self.mesh.size() // self.num_shards

    @property
    def replica(self) -> int:
        """Number of the copy that this rank holds a part of."""
        return self.mesh.get_local_rank(0) if self.mesh.ndim == 2 else 0


def is_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to a model or a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard(model: nn.Module) -> None:
    """Have each part of a model hold its shards again.

    After a forward pass without a backward, as in an evaluation, the outermost part holds whole
    parameters, which FSDP gathered for the backward that it expects.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory; a plain tensor is its own."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def shard_of(whole: Tensor, *, like: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that each rank has whole, split like another tensor.

    Without communication. What is a shard already stays one, and so does what is like a whole.
    """
    if not isinstance(like, DTensor) or isinstance(whole, DTensor):
        return whole
    on_device = whole.to(like.to_local().device)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)


def sharding_of(model: nn.Module, *, world_size: int) -> Sharding:
    """Return how a model was sharded.

    Args:
        model: in which `fully_shard` was applied.
        world_size: workers of the session.

    Raises:
        UnsupportedError: a parameter is left out, or is split in another way than over the
            workers once; or whole copies lie on single ranks.
    """
    mesh: DeviceMesh | None = None
    reduced = {id(p) for _, _, parameters in units_of(model) for p in parameters}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or id(parameter) not in reduced:
            raise UnsupportedError(
                f"model.{name} is not sharded while other parameters are, so nobody would average "
                "its gradient: call fully_shard(model) on the whole model last, without "
                "ignored_params"
            )
        _check_placements(name, parameter)
        mesh = mesh or parameter.device_mesh
        if parameter.device_mesh != mesh:
            raise UnsupportedError(
                f"model.{name} lies on {parameter.device_mesh} and others on {mesh}: shard the "
                "whole model over one mesh"
            )
    assert mesh is not None
    _check_mesh(mesh, world_size=world_size)
    return Sharding(mesh=mesh)


def _check_placements(name: str, parameter: DTensor) -> None:
    *replicated, sharded = parameter.placements
    known = len(replicated) <= 1 and all(isinstance(one, Replicate) for one in replicated)
    if not known or not isinstance(sharded, Shard):
        raise UnsupportedError(
            f"model.{name} has the placements {parameter.placements}: a session takes models that "
            "fully_shard split over a mesh of one dimension, or of two (replicate, shard), and "
            "none with tensor parallelism"
        )


def _check_mesh(mesh: DeviceMesh, *, world_size: int) -> None:
    if sorted(mesh.mesh.flatten().tolist()) != list(range(world_size)):
        raise UnsupportedError(
            f"the model is sharded over the ranks {mesh.mesh.tolist()} and the session has "
            f"{world_size} workers: shard it over all of them"
        )
    if mesh.ndim == 2 and mesh.size(-1) == 1:
        raise UnsupportedError(
            "the model's mesh has a shard dimension of 1, so every rank holds a whole copy: pass "
            "the bare module, the session wraps it in DDP"
        )


def units_of(model: nn.Module) -> Iterator[tuple[str, FSDPModule, Sequence[nn.Parameter]]]:
    """Yield name, module and parameters of each part that `fully_shard` was called on.

    A parameter belongs to the innermost of them that contains it.
    """
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name, module, list(_own_parameters(cast("nn.Module", module), is_root=True))


def _own_parameters(module: nn.Module, *, is_root: bool) -> Iterator[nn.Parameter]:
    if isinstance(module, FSDPModule) and not is_root:
        return
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _own_parameters(child, is_root=False)
