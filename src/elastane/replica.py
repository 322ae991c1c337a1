"""The model as users hold it: one stable module that forwards to the current replica wrapper.

Knows DDP and the kinds of model that are refused; nothing of statistics or data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from elastane._compat import no_buffer_sync
from elastane.errors import ArgumentError, UnsupportedError, describe
from elastane.sharding import is_sharded

__all__ = [
    "Replica",
    "check_model",
    "fewest_samples",
    "idle_batch_norm",
    "merge_batch_statistics",
    "without_sync",
    "wrap",
]

_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
_OWN_DDP_ARGUMENTS = {
    "self",
    "module",
    "process_group",
    "device_mesh",
    "broadcast_buffers",
    "forward_sync_buffers",
}


def check_model(
    model: nn.Module, *, ddp: Mapping[str, Any], shard: Callable[..., Any] | None = None
) -> None:
    """Refuse what can't be trained by a session.

    Args:
        model: bare module, or one that `fully_shard` was applied to.
        ddp: further arguments for DDP.
        shard: the user's function that shards the model, or `None`.

    Raises:
        UnsupportedError: a model that is wrapped already, or with sparse gradients.
        ArgumentError: nothing to train, or an argument that DDP does not have.
    """
    _check_ddp(ddp)
    if shard is not None:
        _check_to_be_sharded(model)
    if ddp and (shard is not None or is_sharded(model)):
        rule, way_out = "given with a sharded model, which DDP does not wrap", "Leave it out."
        raise ArgumentError(describe("ddp", dict(ddp), rule=rule, way_out=way_out))
    for name, module in model.named_modules():
        where = f"model.{name}" if name else "model"
        if isinstance(module, (*_WRAPPERS, Replica)):
            raise UnsupportedError(
                f"{where} is wrapped already, in {type(module).__name__}: pass the bare module; "
                "the session wraps it, and wraps it again when the workers change"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UnsupportedError(
                f"{where} has sparse gradients, which are not supported: build it with sparse=False"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        rule, way_out = "has no parameter that requires a gradient", "Unfreeze something."
        raise ArgumentError(describe("model", type(model).__name__, rule=rule, way_out=way_out))


def _check_to_be_sharded(model: nn.Module) -> None:
    """Refuse what would not be the same model after it was copied bare and sharded."""
    if is_sharded(model):
        rule = "given with a model that is sharded already"
        way_out = "Pass the bare module, and leave fully_shard to this function."
        raise ArgumentError(describe("shard", "a function", rule=rule, way_out=way_out))
    for name, module in model.named_modules():
        where = f"model.{name}" if name else "model"
        if any(kind.__name__.endswith("SyncBatchNorm") for kind in type(module).__mro__):
            raise UnsupportedError(
                f"{where} has statistics of all workers' batches, which are weighted by hooks that "
                "a model sharded anew would lose: take BatchNorm, or leave shard out"
            )
        if type(module).__name__ == "OptimizedModule":
            raise UnsupportedError(
                f"{where} is compiled already, and a model sharded anew would not be: call "
                "module.compile() in the function that you pass as shard"
            )


def fewest_samples(model: nn.Module) -> int:
    """Return how many samples a micro-batch needs: 2 with batch statistics, else 1."""
    return 2 if any(isinstance(module, _BatchNorm) for module in model.modules()) else 1


@contextmanager
def idle_batch_norm(model: nn.Module) -> Iterator[None]:
    """Keep batch statistics out of the running averages for the length of a block."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    saved = [(layer.momentum, _copied(layer.num_batches_tracked)) for layer in layers]
    try:
        for layer in layers:
            layer.momentum = 0.0
        yield
    finally:
        for layer, (momentum, count) in zip(layers, saved, strict=True):
            layer.momentum = momentum
            if layer.num_batches_tracked is not None and count is not None:
                layer.num_batches_tracked.copy_(count)


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def merge_batch_statistics(
    model: nn.Module, *, sum_over_workers: Callable[[torch.Tensor], None], counted: bool = True
) -> None:
    """Give all workers the same running statistics of BatchNorm: those of all their samples.

    The mean of the workers' means, and by the law of total variance the mean of their variances
    plus the variance of their means. Each worker counts once, and one that has seen no batch yet
    not at all.

    Args:
        model: bare module.
        sum_over_workers: adds up a float64 tensor over the workers, in place.
        counted: whether this worker's own statistics take part; not those it has just copied.
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and _has_statistics(m)]
    if not layers:
        return
    rows = [_statistics(layer) for layer in layers]
    flat = torch.cat(rows) if counted else torch.zeros_like(torch.cat(rows))
    sum_over_workers(flat)
    for layer, row in zip(layers, flat.split([row.numel() for row in rows]), strict=True):
        _set_statistics(layer, row)


def _has_statistics(layer: _BatchNorm) -> bool:
    return layer.running_mean is not None and layer.running_var is not None


def _statistics(layer: _BatchNorm) -> torch.Tensor:
    """Return (1, batches seen, mean, mean square) in float64; zeros if no batch was seen."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    mean = layer.running_mean.double()
    tracked = layer.num_batches_tracked
    count = torch.ones_like(mean[:1]) if tracked is None else tracked.double().reshape(1)
    row = torch.cat([torch.ones_like(count), count, mean, layer.running_var.double() + mean**2])
    return row * (count > 0)


def _set_statistics(layer: _BatchNorm, row: torch.Tensor) -> None:
    """Set a layer's statistics from the sum of the workers' rows."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    num_workers = row[0].item()
    if num_workers == 0:
        return
    mean, mean_square = (row[2:] / num_workers).chunk(2)
    layer.running_mean.copy_(mean)
    layer.running_var.copy_((mean_square - mean**2).clamp(min=0))
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.copy_((row[1] / num_workers).round())


def wrap(
    model: nn.Module, *, group: dist.ProcessGroup, options: Mapping[str, Any]
) -> DistributedDataParallel:
    """Return the model in DDP over `group`; buffers are not broadcast in forward.

    Args:
        model: bare module, on its device.
        group: data-parallel group.
        options: further arguments of DDP.
    """
    return DistributedDataParallel(model, process_group=group, **no_buffer_sync(), **options)


def _check_ddp(options: Mapping[str, Any]) -> None:
    """Refuse names that DDP does not know, or that the session sets itself."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    for name in options:
        if name not in known or name in _OWN_DDP_ARGUMENTS:
            rule = "unknown option" if name not in known else "is set by the session"
            way_out = "Pass arguments of DistributedDataParallel, such as find_unused_parameters."
            raise ArgumentError(
                describe(f"ddp[{name!r}]", options[name], rule=rule, way_out=way_out)
            )


def without_sync(model: Replica) -> AbstractContextManager[None]:
    """Return a context in which backward leaves gradients unaveraged; forward belongs in it."""
    wrapper = model.__dict__["_wrapper"]
    if wrapper is None:
        return nullcontext()
    if wrapper.static_graph:
        raise UnsupportedError(
            "ddp['static_graph']=True can't be combined with several micro-batches a worker, DDP "
            "wants its first backward to average: leave it out, or take one micro-batch"
        )
    return wrapper.no_sync()


class Replica(nn.Module):
    """A module that stays the same object while its replica wrapper comes and goes.

    Its parameters, buffers and state-dict keys are the inner module's, and attributes that it
    lacks are looked up there. With gradients on, `forward` goes through the wrapper; without, to
    the inner module, so that workers may evaluate different numbers of batches.

    Args:
        model: the bare module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["inner"] = model
        self.follow()
        self.__dict__["_wrapper"] = self.__dict__["_on_failure"] = None
        self.training = model.training

    def follow(self) -> None:
        """Have the inner module's parameters, buffers and modules, also if it has new ones."""
        inner = self.__dict__["inner"]
        for name in ("_parameters", "_buffers", "_modules"):
            self.__dict__[name] = inner.__dict__[name]

    def use(
        self, wrapper: nn.Module | None, *, on_failure: Callable[[str], None] | None = None
    ) -> None:
        """Forward to `wrapper` from now on, or to the inner module.

        Args:
            wrapper: replica wrapper, or `None`.
            on_failure: told of a wrapper that failed where the inner module did not: DDP
                communicates in its second forward, and a peer may be gone by then. The inner
                module's output is returned, and the step ends as one whose group broke.
        """
        self.__dict__["_wrapper"] = wrapper
        self.__dict__["_on_failure"] = on_failure

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the current replica."""
        wrapper = self.__dict__["_wrapper"]
        if wrapper is None or not torch.is_grad_enabled():
            return self.__dict__["inner"](*args, **kwargs)
        on_failure = self.__dict__["_on_failure"]
        try:
            return wrapper(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if on_failure is None:
                raise
            output = self.__dict__["inner"](*args, **kwargs)
            on_failure(str(error))
            return output

    def _get_name(self) -> str:
        """Return the inner module's name, by which other libraries know kinds of models."""
        return self.__dict__["inner"]._get_name()

    def __repr__(self) -> str:
        return f"Replica({self.__dict__['inner']!r})"

    def train(self, mode: bool = True) -> Replica:
        """Set training mode, on the inner module too."""
        self.training = mode
        self.__dict__["inner"].train(mode)
        wrapper = self.__dict__["_wrapper"]
        if wrapper is not None:
            wrapper.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the inner module's state."""
        return self.__dict__["inner"].state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the inner module's state."""
        return self.__dict__["inner"].load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = "inner" not in self.__dict__ or name in self.__dict__
        if own:
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["inner"], name, value)

    def __reduce__(self) -> tuple[type[Replica], tuple[nn.Module]]:
        return Replica, (self.__dict__["inner"],)
