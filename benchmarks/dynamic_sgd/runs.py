"""How the runs of the Dynamic SGD tables are carried out, each by a function of its spec.

Knows the form of a spec; nothing of which runs there are, or of what is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.dynamic_sgd.measure import WINDOW, peak_ratio, recover_steps
from benchmarks.dynamic_sgd.noise import measure_noise
from benchmarks.dynamic_sgd.state import HeldOut, load_bench, save_bench
from benchmarks.dynamic_sgd.workers import change_on_workers
from benchmarks.runs.calibration import calibrate
from benchmarks.runs.subject import Conditions, DivergedError, set_up, steps_of, subject_of
from benchmarks.runs.training import has_learnt
from elastane import Linear, WarmUp

__all__ = ["branch", "calibrate", "change_on_workers", "finish", "measure_noise", "start"]

_LAST = 10

Spec = Mapping[str, Any]


def start(spec: Spec, needs: Mapping[str, Spec]) -> dict[str, Any]:  # noqa: ARG001
    """Train under linear scaling with warm-up, and save the state at some points of the run.

    Returns:
        For each point that was reached its file, its progress, and the held-out losses of the last
        steps up to it; and the held-out loss of the untrained model.
    """
    subject = subject_of(spec["task"], quick=spec["quick"])
    bench = set_up(
        subject,
        Conditions(
            seed=spec["seed"],
            rule=WarmUp(rule=Linear()),
            scale=spec["scale"],
            momentum=spec["momentum"],
            measure=False,
        ),
    )
    held_out = HeldOut(bench)
    found: dict[str, Any] = {
        "untrained": held_out.loss(),
        "points": {},
        "files": [],
        "broke_off": False,
    }
    left = sorted(spec["points"].items(), key=lambda point: point[1])
    losses: list[float] = []
    length = subject.recipe.num_steps
    try:
        with bench.session:
            for result in steps_of(bench):
                name, part = left[0]
                if result.progress >= part * length - WINDOW * spec["scale"]:
                    losses.append(held_out.loss())
                if result.progress >= part * length:
                    file = f"states/{spec['name']} {name}.pt"
                    save_bench(bench, folder=spec["folder"], file=file)
                    found["files"].append(file)
                    found["points"][name] = {
                        "file": file,
                        "part": result.progress / length,
                        "before": losses[-WINDOW:],
                    }
                    losses, left = [], left[1:]
                    if not left:
                        break
    except DivergedError:
        found["broke_off"] = True
    return found


def branch(spec: Spec, needs: Mapping[str, Spec]) -> dict[str, Any]:
    """Change the batch of a saved state, and train on for a number of steps.

    The schedule stands still meanwhile, so that all ramps and ratios are compared at one rate.

    Returns:
        The held-out losses after each step, and what they tell; `{"no_start": True}` where there
        is no state, because the run diverged before the change.
    """
    (began,) = needs.values()
    point = began["points"].get(spec["when"])
    if point is None:
        return {"no_start": True}
    bench = load_bench(spec, point, held=True)
    held_out = HeldOut(bench)
    losses: list[float] = []
    broke_off = False
    try:
        with bench.session:
            for _ in steps_of(bench):
                losses.append(held_out.loss())
                if len(losses) == spec["horizon"]:
                    break
    except DivergedError:
        broke_off = True
    last = losses[-_LAST:]
    diverged = broke_off or not has_learnt(sum(last) / len(last), untrained=began["untrained"])
    return {
        "no_start": False,
        "diverged": diverged,
        "before": point["before"],
        "after": losses,
        "peak_ratio": None if broke_off else peak_ratio(point["before"], losses),
        "recover_steps": None if broke_off else recover_steps(point["before"], losses),
    }


def finish(spec: Spec, needs: Mapping[str, Spec]) -> dict[str, Any]:
    """Change the batch of a saved state, train to the run's own end, and evaluate."""
    (began,) = needs.values()
    point = began["points"].get(spec["when"])
    if point is None:
        return {"no_start": True}
    bench = load_bench(spec, point, held=False)
    metric = loss = None
    try:
        with bench.session:
            for _ in steps_of(bench):
                pass
        metric, loss = bench.evaluate()
    except DivergedError:
        pass
    return {"no_start": False, "metric": metric, "loss": loss, "diverged": metric is None}
