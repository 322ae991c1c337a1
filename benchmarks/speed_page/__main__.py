"""Writes the page on speed, out of the committed results of the benchmarks.

    python -m benchmarks.speed_page

Knows the results' JSON and Markdown; measures nothing, and has no number of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.elastic_page import RESULTS, ROOT, page_of, table
from benchmarks.speed_page.picture import HEIGHTS, draw_overhead
from benchmarks.speed_page.verdicts import (
    DEFAULT,
    EVERY,
    FLOOR,
    FLOOR_OF_MEAN,
    PEERS,
    Form,
    Verdict,
    by_form,
    told,
    verdicts,
)

__all__ = ["PAGE", "PICTURE", "main", "page"]

Row = Mapping[str, Any]

PAGE = ROOT / "docs" / "speed.md"
PICTURE = ROOT / "docs" / "_static" / "speed-overhead.png"
_HEAD = (
    "# Speed: what a step costs\n\n"
    "This page is written by `python -m benchmarks.speed_page` out of `benchmarks/results`. All "
    "runs were made on a machine with two processors and no GPU, one thread for each process. "
    "Nothing here says what a step costs on a GPU."
)
FORMS: Mapping[Form, str] = {
    (1, 2, False): "1 process, 2 micro-batches",
    (2, 1, False): "2 processes",
    (2, 4, False): "2 processes, 4 micro-batches",
    (1, 2, True): "1 process, 2 micro-batches, batch x 8",
    (2, 1, True): "2 processes, batch x 8",
}
_SHOWN = {
    "plain again": "plain again",
    FLOOR_OF_MEAN: "floor, mean only",
    FLOOR: "floor",
    DEFAULT: "elastane",
    EVERY: "every step",
    "elastane, every 4th step": "every 4th step",
    "plain, clipped": "plain, clipped",
    "elastane, clipped": "elastane, clipped",
    **dict.fromkeys(PEERS, ""),
}
_LOOPS = ("plain", "elastane", "elastane with events")


def page(results: Path) -> str:
    """Return the page made of the results that are there."""
    sections: Mapping[str, Callable[[Row], str]] = {
        "overhead": _overhead,
        "fixed": _fixed,
        "loader": _loader,
        "startup": _startup,
    }
    return page_of(sections, head=_HEAD, results=results)


def _overhead(found: Row) -> str:
    rows = found["rows"]
    parts = [
        "## Beside plain training and the peers",
        "Processor time of all workers over that of plain SGD (with DDP where there are two "
        "processes) on the same model and data, in the same processes, block by block in turn: "
        "the median over the blocks. `plain again` is the noise. `floor` is a plain step that only "
        "reads each micro-gradient and the mean gradient once more; `floor, mean only` reads the "
        "mean alone, which is what is left to do in a step that is not measured: whether it is "
        "finite must be known, and its norm comes with it. `elastane` measures as seldom as the "
        "noise allows, the default, with clipping or without; its number is the mean over all "
        "blocks, as few of its steps are measured. A star marks a number whose 95 % interval is "
        "wider than a point.",
    ]
    for form, title in FORMS.items():
        models = by_form(rows).get(form, {})
        names = [name for name in _SHOWN if any(name in methods for methods in models.values())]
        cells = [
            [model, *(_cell(methods.get(name)) for name in names)]
            for model, methods in models.items()
        ]
        if cells:
            parts += [f"**{title}**", table(["model", *(_SHOWN[n] or n for n in names)], cells)]
    if any(row["method"] == FLOOR for row in rows):
        parts += [
            "![Processor time over plain, the floor as bars](_static/speed-overhead.png)",
            f"Lines are 95 % intervals; what lies above {HEIGHTS[1]} is not shown.",
        ]
    parts += [f"Missing, {name}: {why}." for name, why in found["missing"].items()]
    return "\n\n".join([*parts, _goals(verdicts(rows))])


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    found = told(row)
    return f"{found.ratio:.3f}{'' if found.is_resolved else '*'}"


def _goals(found: Sequence[Verdict]) -> str:
    missed = [one for one in found if not one.is_met]
    rows = [
        [
            *(one.goal, one.model, FORMS[one.form], f"{one.found:.3f}", f"{one.bound:.3f}"),
            "–" if one.floor is None else f"{one.floor:.3f}",
        ]
        for one in missed
    ]
    said = (
        "Goals: the default at most 1.05 at 0.1M parameters, 1.02 at 1 to 5M and at 49M, 1.03 at "
        "10M, and below each peer; each step measured at most two points above the floor; with the "
        "norm shared for clipping at most 1.01 times a plain step that clips, above 1M. "
        f"{len(found) - len(missed)} of {len(found)} hold"
    )
    if not missed:
        return f"{said}."
    head = ["goal", "model", "where", "measured", "at most", "its floor"]
    out_of_reach = sum(one.is_out_of_reach for one in missed)
    unsure = sum(one.is_unsure for one in missed)
    why = (
        "The floor of the default is the one of the mean only, that of every step reads all. In "
        f"{out_of_reach} of these rows it is above the goal by itself: nothing that looks whether "
        "a gradient is finite before it steps can hold them. In "
        f"{unsure} rows the 95 % interval reaches down to the goal. What lies between floor and "
        "measured is a step's fixed time, which is taken apart below, and reading gradients when "
        "they are ready and not all at once."
    )
    return f"{said}; the others are these:\n\n{table(head, rows)}\n\n{why}"


def _fixed(found: Row) -> str:
    parts = [
        "## Where a step's fixed time goes",
        "Microseconds of a step of a model of 108 parameters, by part, so that nothing else costs; "
        "the price of timing is taken off. What is marked `beside the step` is another thread's.",
    ]
    rows = found["rows"]
    for workers, micro_batches in dict.fromkeys((r["workers"], r["micro_batches"]) for r in rows):
        own = [r for r in rows if (r["workers"], r["micro_batches"]) == (workers, micro_batches)]
        times = {(row["loop"], row["part"]): row["us_median"] for row in own}
        named = sorted(
            dict.fromkeys(row["part"] for row in own),
            key=lambda part: (part.startswith("step"), -times.get((_LOOPS[1], part), 0.0)),
        )
        cells = [[part, *(times.get((loop, part), "–") for loop in _LOOPS)] for part in named]
        parts += [
            f"**Workers: {workers}; micro-batches of each: {micro_batches}**",
            table(["part", *_LOOPS], cells),
        ]
    return "\n\n".join(parts)


def _loader(found: Row) -> str:
    rows = [
        [
            *(row["dataset"], row["num_workers"], row["batch"], row["loader"]),
            *(
                f"{row['ratio']:.3f}",
                f"{row['low']:.3f}–{row['high']:.3f}",
                f"{row['samples_per_s']:,}",
            ),
        ]
        for row in found["rows"]
    ]
    dealt = [
        [
            *(f"{row['epoch_samples']:,}", f"{row['batch']:,}", row["workers"]),
            *(f"{row['deal_ms']:.2f}", f"{row['ns_per_sample']:.0f}", f"{row['peak_bytes']:,}"),
        ]
        for row in found["dealing"]
    ]
    head = [
        "dataset",
        "loader processes",
        "batch",
        "loader",
        "rate / DataLoader's",
        "95 %",
        "samples/s",
    ]
    head_dealt = ["epoch", "batch", "workers", "ms", "ns a sample", "peak bytes"]
    return "\n\n".join(
        [
            "## Loading",
            "Samples a second over those of a `DataLoader` with `DistributedSampler`; the goal is "
            f"{found['goal']:g}.",
            table(head, rows),
            "Dealing a worker's part of one batch: time and memory do not grow with the epoch.",
            table(head_dealt, dealt),
        ]
    )


def _startup(found: Row) -> str:
    rows = [
        [row["what"], row["workers"] or "–", row["ms_median"], f"{row['ms_q1']}–{row['ms_q3']}"]
        for row in found["rows"]
    ]
    return "\n\n".join(
        [
            "## Starting",
            "Milliseconds to the end of a command, or, where there are workers, until each of them "
            "has made its first step.",
            table(["what", "workers", "median", "quartiles"], rows),
        ]
    )


@click.command()
def main() -> None:
    """Write the page and its picture."""
    PAGE.write_text(page(RESULTS))
    path = RESULTS / "overhead.json"
    if path.exists():
        draw_overhead(json.loads(path.read_text())["rows"], titles=FORMS, path=PICTURE)


if __name__ == "__main__":
    main()
