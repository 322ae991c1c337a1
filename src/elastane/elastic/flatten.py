"""A state tree as one JSON text and a list of tensors, and back to the bit.

What transfers and checkpoints are made of. Knows nothing of models, groups or files; no pickle.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastane.errors import StateError, UnsupportedError, describe

__all__ = ["FlatState", "flatten_state", "unflatten_state"]

_Path = tuple[object, ...]
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
}
_MALFORMED = (LookupError, RecursionError, TypeError, ValueError, struct.error)
_MAPPING_TAGS = {kind: tag for tag, kind in _MAPPINGS.items()}
_WAY_OUT = (
    "A state holds dicts with str or int keys, lists, tuples, str, int, float, bool, None and "
    "dense tensors: convert it, or leave it out."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A state tree taken apart.

    Attributes:
        skeleton: the tree as JSON, with a number for each tensor.
        tensors: the tensors by their numbers; detached, and otherwise the tree's own.
        names: where in the tree each tensor was, as in `"model.conv.weight"`; all different.
    """

    skeleton: str
    tensors: list[torch.Tensor]
    names: list[str]


def flatten_state(tree: object) -> FlatState:
    """Take a state tree apart.

    A tensor that occurs twice is listed twice, and comes back as two tensors; so does a list or
    dict. Whether a tensor requires a gradient, and attributes set on an OrderedDict, are left out.
    Subclasses of numbers, such as `numpy.float64`, come back as the plain number.

    Args:
        tree: dicts, OrderedDicts and Counters with str or int keys, lists, tuples, str, int, float
            (also infinite and NaN), bool, None and dense tensors of any dtype, shape and device.

    Raises:
        UnsupportedError: something else is in the tree; the message says where.

    Example:
        >>> flat = flatten_state({"step": 3, "mean": torch.zeros(2)})
        >>> flat.skeleton, flat.names
        ('{"dict":[["step",3],["mean",{"tensor":0}]]}', ['mean'])
    """
    found: dict[str, torch.Tensor] = {}
    try:
        skeleton = json.dumps(_encode(tree, (), found), allow_nan=False, separators=(",", ":"))
    except RecursionError:
        rule = "is nested too deep, or holds itself"
        raise UnsupportedError(
            describe("state", type(tree).__name__, rule=rule, way_out=_WAY_OUT)
        ) from None
    return FlatState(skeleton=skeleton, tensors=list(found.values()), names=list(found))


def unflatten_state(skeleton: str, tensors: Sequence[torch.Tensor]) -> Any:
    """Put a tree together again that `flatten_state` took apart.

    Args:
        skeleton: the tree as JSON.
        tensors: its tensors; they are taken over, not copied.

    Raises:
        StateError: `flatten_state` did not write this, or not with this number of tensors.

    Example:
        >>> unflatten_state('{"dict":[[0,{"tensor":0}],["lr",0.1]]}', [torch.tensor(3)])
        {0: tensor(3), 'lr': 0.1}
    """
    rest = list(reversed(tensors))
    try:
        tree = _decode(json.loads(skeleton), rest)
    except _MALFORMED as error:
        raise StateError(
            f"this is no state's skeleton, or it has more than {len(tensors)} tensors, {error!r}: "
            "pass what flatten_state() returned"
        ) from error
    if rest:
        raise StateError(f"{len(rest)} of {len(tensors)} tensors have no place in the skeleton")
    return tree


def _encode(value: object, path: _Path, found: dict[str, torch.Tensor]) -> object:
    """Return `value` as JSON can hold it; tensors are added to `found` by their names."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float, str)):
        return _encode_scalar(value)
    if isinstance(value, torch.Tensor):
        return {"tensor": _note(value, path, found)}
    if type(value) in (list, tuple):
        assert isinstance(value, (list, tuple))
        nodes = [_encode(item, (*path, index), found) for index, item in enumerate(value)]
        return nodes if isinstance(value, list) else {"tuple": nodes}
    if type(value) in _MAPPING_TAGS:
        assert isinstance(value, dict)
        return {_MAPPING_TAGS[type(value)]: _encode_items(value, path, found)}
    raise _refusal(value, path, rule=f"{type(value).__name__} can't be part of a state")


def _encode_scalar(value: float | str) -> object:
    """Return a number or text; as hexadecimal digits what JSON readers would not give back."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return {"str": value.encode(errors="surrogatepass").hex()}
    elif isinstance(value, float) and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    elif isinstance(value, int) and value.bit_length() > 63:
        return {"int": hex(value)}
    return value


def _encode_items(
    mapping: Mapping[object, object], path: _Path, found: dict[str, torch.Tensor]
) -> list[list[object]]:
    """Return a mapping as a list of pairs: JSON objects would turn int keys into strings."""
    pairs = []
    for key, item in mapping.items():
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise _refusal(key, path, rule="keys of a state must be str or int", what="a key of ")
        pairs.append([_encode_scalar(key), _encode(item, (*path, key), found)])
    return pairs


def _note(tensor: torch.Tensor, path: _Path, found: dict[str, torch.Tensor]) -> int:
    """Add a tensor to `found` under a name of its own and return its number."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = f"a {type(tensor).__name__} ({tensor.layout}, {tensor.dtype}, {tensor.device})"
        raise _refusal(None, path, rule=f"{kind} can't be part of a state")
    name = ".".join(str(part) for part in path) or "state"
    while name in found:
        name += "#"
    found[name] = tensor.detach().resolve_conj().resolve_neg()
    return len(found) - 1


def _refusal(value: object, path: _Path, *, rule: str, what: str = "") -> UnsupportedError:
    place = "state" + "".join(f"[{part!r}]" for part in path)
    if value is None:
        return UnsupportedError(f"{what}{place}: {rule}. {_WAY_OUT}")
    return UnsupportedError(describe(what + place, value, rule=rule, way_out=_WAY_OUT))


def _decode(node: Any, rest: list[torch.Tensor]) -> Any:
    """Return what `_encode` made into `node`; tensors are taken from the end of `rest`."""
    if isinstance(node, list):
        return [_decode(item, rest) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, content),) = node.items()
    if tag == "tensor":
        return rest.pop()
    if tag == "tuple":
        return tuple([_decode(item, rest) for item in content])
    if tag in _MAPPINGS:
        pairs = [(_decode(key, rest), _decode(item, rest)) for key, item in content]
        return _MAPPINGS[tag](dict(pairs))
    return _DECODERS[tag](content)


_DECODERS: dict[str, Callable[[str], float | str]] = {
    "float": lambda digits: struct.unpack(">d", bytes.fromhex(digits))[0],
    "int": lambda digits: int(digits, 16),
    "str": lambda digits: bytes.fromhex(digits).decode(errors="surrogatepass"),
}
