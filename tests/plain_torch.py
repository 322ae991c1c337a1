"""Reads a checkpoint as somebody does who has torch alone: in an interpreter without elastane."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

_SCRIPT = """
import sys
sys.modules["elastane"] = None  # an import of it would fail
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
FLOAT64 = torch.float64

{build}
folder, out = sys.argv[1:]
model = {name}()
state = {{"model": model.state_dict(), "optimizer": {{"state": {{
    n: {{"momentum_buffer": torch.zeros_like(p)}} for n, p in enumerate(model.parameters())
}}}}}}
dcp.load(state, checkpoint_id=folder)
model.load_state_dict(state["model"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer.load_state_dict({{**optimizer.state_dict(), "state": state["optimizer"]["state"]}})
weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
momenta = torch.cat([optimizer.state[p]["momentum_buffer"].reshape(-1) for p in model.parameters()])
torch.save({{"weights": weights, "momenta": momenta}}, out)
"""


def read_by_torch_alone(
    checkpoint: Path, build: Callable[[], nn.Module], *, folder: Path
) -> dict[str, torch.Tensor]:
    """Load a checkpoint into a bare model and its SGD; return their numbers.

    Args:
        checkpoint: its folder.
        build: builds the model, out of its own source, `nn`, `torch` and `FLOAT64` alone.
        folder: for the script and what it writes.
    """
    script, out = folder / "read.py", folder / "read"
    script.write_text(_SCRIPT.format(build=inspect.getsource(build), name=build.__name__))
    command = [sys.executable, "-W", "ignore", str(script), str(checkpoint), str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, timeout=900, env=environment, cwd=folder)
    return torch.load(out, weights_only=True)
