"""State of the random number generators of this process, as tensors and numbers.

Knows nothing of sessions; which generators there are: Python's, NumPy's, torch's, the device's.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["rng_state", "set_rng_state"]


def rng_state(*, rank: int, device: torch.device) -> dict[str, Any]:
    """Return the state of all generators; it loads with `weights_only=True`."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    state: dict[str, Any] = {
        "rank": rank,
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_version": version,
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_position": int(numpy_state["state"]["pos"]),
        "numpy_has_gauss": int(numpy_state["has_gauss"]),
        "numpy_gauss": float(numpy_state["gauss"]),
    }
    if gauss is not None:
        state["python_gauss"] = gauss
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Any], *, rank: int, device: torch.device) -> None:
    """Restore the generators.

    The rank that saved the state gets it back to the bit. Every other rank is seeded from the
    state and its own number, so that the workers' dropout masks stay different. The state's
    tensors may lie on any device, as `torch.load(map_location=...)` leaves them.
    """
    state = {name: v.cpu() if isinstance(v, torch.Tensor) else v for name, v in state.items()}
    if state["rank"] != rank:
        text = state["torch"].numpy().tobytes() + str(rank).encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return
    words = tuple(state["python"].tolist())
    random.setstate((state["python_version"], words, state.get("python_gauss")))
    key = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(
        ("MT19937", key, *(state[f"numpy_{name}"] for name in ("position", "has_gauss", "gauss")))
    )
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
