"""Writes the page on optimizers, out of the committed results of the benchmarks.

    python -m benchmarks.optimizers_page

Knows the results' JSON and Markdown; measures nothing, and has no number of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.adam.rules import FOUND, FOUND_LONGER
from benchmarks.elastic_page import RESULTS, ROOT, page_of, table
from benchmarks.optimizers_page.picture import draw_study
from benchmarks.results_page.text import origin, plus_minus, shown

__all__ = ["PAGE", "PICTURE", "main", "page", "study_parts"]

Row = Mapping[str, Any]

PAGE = ROOT / "docs" / "optimizers.md"
PICTURE = ROOT / "docs" / "_static" / "optimizers-adam.png"
_HEAD = (
    "# Optimizers\n\n"
    "This page is written by `python -m benchmarks.optimizers_page` out of `benchmarks/results`. "
    "[Mathematics](mathematics.md#adam-and-its-kin) has the formulas, the "
    "[guide](guide.md#adam-and-its-kin) says how to write it."
)
_OWN_RULE = {"SGD": "adascale", "SGD, momentum": "adascale", "ASGD": "adascale", "LARS": "adascale"}


def page(results: Path) -> str:
    """Return the page made of the results that are there."""
    sections: Mapping[str, Callable[[Row], str]] = {"adam": _adam, "optimizers": _optimizers}
    return page_of(sections, head=_HEAD, results=results)


def study_parts(found: Row) -> tuple[Row, dict[int, Row], Row | None, list[Row]]:
    """Return a study's base row, the best of the search by scale, of the longer one, and rules."""
    best = {row["scale"]: row for row in found["best"] if row["rule"] == FOUND}
    longer = [row for row in found["best"] if row["rule"] == FOUND_LONGER]
    rules = [row for row in found["rows"] if row["rule"] not in (FOUND, FOUND_LONGER)]
    base = next(row for row in found["rows"] if (row["scale"], row["lr_factor"]) == (1, 1.0))
    return base, best, longer[0] if longer else None, rules


def _adam(found: Row) -> str:
    base, best, longer, rules = study_parts(found)
    still = [row for row in rules if isinstance(row["scale"], int)]
    changed = [row for row in rules if not isinstance(row["scale"], int)]
    scales = sorted({row["scale"] for row in still})
    lines = [_line(base, "base batch", base=base)]
    for scale in scales:
        lines += [_line(row, row["rule"], base=base) for row in still if row["scale"] == scale]
        if scale in best:
            row = best[scale]
            lines.append(_line(row, f"*{FOUND}: lr x {row['lr_factor']:g}*", base=base))
        if longer is not None and longer["scale"] == scale:
            name = f"*{FOUND_LONGER}: lr x {longer['lr_factor']:g}*"
            lines.append(_line(longer, name, base=base))
    head = ["", "S", "bits a letter", "above base", "steps", "gain", "diverged"]
    tuned = [row for row in found["rows"] if (row["rule"], row["scale"]) == (FOUND, 1)]
    searches = "; ".join(f"x {r['lr_factor']:g}: {shown(r['metric_mean'])}" for r in tuned)
    parts = [
        "## AdamW in larger batches",
        "A transformer of 113,000 parameters learns the letters of the King James version: 2,400 "
        "base steps of 8 passages, lr 0.006 with a warm-up and a cosine, decay 0.1. `S` workers "
        "are emulated by as many micro-batches. Lower is better. Rules have the base batch's "
        "numbers; `found by search` is the best of some learning rates at that scale with as many "
        "samples, or with as many steps as `adamscale` took, as the mean over the same seeds: the "
        "line to reach without a search. `preconditioned` has the gain as AdamW sees the "
        "gradients, the others that of the gradients themselves.",
        "![the study](_static/optimizers-adam.png)",
        table(head, lines),
        f"At the base batch other learning rates gave {searches}.",
    ]
    if changed:
        lines = [_line(row, row["rule"], base=base) for row in changed]
        parts += [
            "The batch changes at a quarter and at half of the run, with the default ramp:",
            table([head[0], "changes", *head[2:]], lines),
        ]
    parts += [_spikes(found), "\n".join(origin(found)).strip()]
    return "\n\n".join(parts)


def _line(row: Row, name: str, *, base: Row) -> list[object]:
    mean = row["metric_mean"]
    return [
        name,
        row["scale"],
        plus_minus(mean, row["metric_sd"]),
        "–" if mean is None else f"{mean - base['metric_mean']:+.3f}",
        shown(row["steps_mean"]),
        shown(row["mean_gain"]),
        f"{row['diverged']} of {row['seeds']}",
    ]


def _spikes(found: Row) -> str:
    if not found["spikes"]:
        return ""
    lines = [
        [
            row["changes"],
            row["moments"],
            shown(row["peak_ratio_mean"]),
            shown(row["peak_ratio_max"]),
            f"{row['diverged']} of {row['seeds']}",
        ]
        for row in found["spikes"]
    ]
    return "\n\n".join(
        [
            "**Moments are carried over a change.** In the middle of the run the batch changes at "
            "once; the loss of a fixed held-out batch in the next 40 steps, as a running mean of "
            "five, is set against that before. Beside it the same with the optimizer's state "
            "dropped at the change. After a shrink the loss goes up to where a small batch, at the "
            "same rate, keeps it, with either. Optimizers for which a reset does harm are in the "
            "table of all optimizers.",
            table(["batches", "moments", "peak / before", "highest", "diverged"], lines),
        ]
    )


def _optimizers(found: Row) -> str:
    rows = found["rows"]
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    optimizers = list(dict.fromkeys(row["optimizer"] for row in rows))
    cells = {(row["optimizer"], row["rule"]): row for row in rows}
    lines = []
    for name in optimizers:
        own = cells[name, _OWN_RULE.get(name, "adamscale")]
        peaks = [f"{own[key]:.2f}" for key in ("peak_ratio", "peak_ratio_reset")]
        lines.append([name, *(_cell(cells[name, rule]) for rule in rules), *peaks])
    converged, resumed = (sum(row[key] for row in rows) for key in ("converges", "resumes"))
    parts = [
        "## Every optimizer under every rule",
        "A small network learns the digits from a base batch of 8; after 60 steps the batch grows "
        "fourfold, and the run is saved there and resumed. Numbers are the held-out loss at the "
        "end; learning rates were chosen at the base batch alone, so a rule that takes fewer steps "
        f"has a larger loss. {converged} of {len(rows)} runs came below half of the untrained "
        f"model's loss, and {resumed} of {len(rows)} went on to the bit after they were resumed. "
        "The last two columns are the highest loss behind the change over that before it, under "
        "AdaScale for the first four and LARS, AdamScale for the others: with the optimizer's "
        "state carried over, and with it dropped.",
        table(["optimizer", *rules, "peak, carried", "peak, reset"], lines),
    ]
    for name, why in found["missing"].items():
        parts.append(f"**Missing: {name}.** {why}")
    return "\n\n".join(parts)


def _cell(row: Row) -> str:
    marks = "" if row["converges"] else " (not converged)"
    return f"{row['loss_after']:.2f}{marks}{'' if row['resumes'] else ' (not resumed)'}"


def draw(results: Path, *, path: Path) -> None:
    """Draw the picture of the study, if there is one."""
    source = results / "adam.json"
    if source.exists():
        base, best, longer, rules = study_parts(json.loads(source.read_text()))
        still: Sequence[Row] = [row for row in rules if isinstance(row["scale"], int)]
        scales = sorted({row["scale"] for row in still})
        draw_study(still, base=base, found=best, longer=longer, scales=scales, path=path)


@click.command(help="Write the page on optimizers.")
def main() -> None:
    draw(RESULTS, path=PICTURE)
    PAGE.write_text(page(RESULTS), encoding="utf-8")
    click.echo(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
