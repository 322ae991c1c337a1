"""How the runs of the study are carried out, each by a function of its spec.

Knows the form of a spec; nothing of which runs there are, or of what is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.adam.rules import FOUND_LONGER, RULES, Stretched, Way
from benchmarks.dynamic_sgd.measure import WINDOW, peak_ratio
from benchmarks.dynamic_sgd.state import HeldOut
from benchmarks.runs.calibration import calibrate
from benchmarks.runs.subject import Conditions, DivergedError, set_up, steps_of, subject_of
from benchmarks.runs.training import train
from elastane import MomentumRamp

__all__ = ["calibrate", "change_once", "train_once"]

Spec = Mapping[str, Any]

AFTER = 40
"""Steps whose loss is looked at after a change."""


def train_once(spec: Spec, needs: Mapping[str, Spec]) -> dict[str, Any]:
    """Train to the end, with the learning rate of a rule or one that is tried.

    Raises:
        ValueError: it is to take as many steps as a run that never came to its end.
    """
    (_, scale), *changes = spec["scales"]
    way = _way(spec, needs)
    conditions = _conditions(spec, way, scale=scale)
    subject = subject_of(spec["task"], quick=spec["quick"])
    return train(subject, conditions, changes=[(at, to) for at, to in changes]).record()


def change_once(spec: Spec, needs: Mapping[str, Spec]) -> dict[str, Any]:
    """Train up to a change of batch, and for some steps beyond it, with moments kept or reset.

    Returns:
        The losses of a fixed held-out batch after each of the last steps before the change and
        the first ones after it, and the ratio of the highest one to that before.
    """
    (_, scale), (part, after) = spec["scales"]
    conditions = _conditions(spec, _way(spec, needs), scale=scale)
    bench = set_up(subject_of(spec["task"], quick=spec["quick"]), conditions)
    held_out, losses_before, losses = HeldOut(bench), list[float](), list[float]()
    change_at = part * bench.subject.recipe.num_steps
    has_changed = False
    try:
        with bench.session:
            for result in steps_of(bench):
                if has_changed:
                    losses.append(held_out.loss())
                    if len(losses) == AFTER:
                        break
                elif result.progress >= change_at:
                    losses_before.append(held_out.loss())
                    if len(losses_before) < WINDOW:
                        continue
                    bench.batch.scale, has_changed = after, True
                    if spec["moments"] == "reset":
                        bench.optimizer.state.clear()
    except DivergedError:
        return {"diverged": True, "peak_ratio": None, "before": losses_before, "after": losses}
    return {
        "diverged": False,
        "peak_ratio": peak_ratio(losses_before, losses),
        "before": losses_before,
        "after": losses,
    }


def _way(spec: Spec, needs: Mapping[str, Spec]) -> Way:
    if spec["rule"] in RULES:
        return RULES[spec["rule"]]
    steps = None
    if spec["rule"] == FOUND_LONGER:
        ((name, record),) = needs.items()
        if record["metric"] is None:
            raise ValueError(f"{name!r} broke off, so its number of steps says nothing")
        steps = record["steps"]
    return Way(rule=Stretched(steps=steps))


def _conditions(spec: Spec, way: Way, *, scale: int) -> Conditions:
    changes = len(spec["scales"]) > 1
    return Conditions(
        seed=spec["seed"],
        rule=way.rule,
        scale=scale,
        compensation=MomentumRamp() if changes else None,
        measure=way.measure,
        precondition=way.precondition,
        follow=way.follow,
        lr_factor=spec.get("lr_factor", 1.0),
    )
