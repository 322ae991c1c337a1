"""The fields that each kind of event holds at least, for tests of those who emit.

Knows names only; nothing checks an event while training. What they mean: the package's docstring.
"""

from __future__ import annotations

from collections.abc import Mapping

_FIELDS = {
    "start": """elastane_version torch_version rule policy base_batch_size num_steps num_samples
        world_size generation seed parameters""",
    "step": """step progress epoch position loss lr factor gain scale batch_samples num_gradients
        world_size generation grad_norm variance sqr_norm noise_scale single_share
        seconds skipped""",
    "membership": "generation world_size cause pause_s progress step",
    "pause": "reason seconds step",
    "evaluation": "step progress num_samples seconds",
    "policy": "choice reason",
    "checkpoint": "step path seconds",
    "end": "step progress seconds cause",
}

EVENT_FIELDS: Mapping[str, frozenset[str]] = {
    kind: frozenset(names.split()) for kind, names in _FIELDS.items()
}
