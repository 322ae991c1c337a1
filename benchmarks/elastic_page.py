"""Writes the page on what elasticity costs, out of the committed results of the benchmarks.

    python -m benchmarks.elastic_page

Knows the results' JSON and Markdown; measures nothing, and has no number of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

__all__ = ["RESULTS", "ROOT", "main", "page", "page_of", "table"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "measured.md"

_HEAD = (
    "# Measured: what a change costs\n\n"
    "This page is written by `python -m benchmarks.elastic_page` out of `benchmarks/results`. All "
    "runs were made on a machine with two processors and no GPU, with one thread for each "
    "process; so four workers share two processors, and a step takes them longer than it takes two."
)
_KINDS = {
    "join": "a worker joins",
    "leave": "a planned leave",
    "kill": "SIGKILL of a worker",
    "kill_rank0": "SIGKILL of rank 0",
    "kill_two": "SIGKILL of two at once",
    "hang": "SIGSTOP, beyond the limit of 1 s",
    "refill": "a slot's next worker joins",
}
_EVENTS = {
    "join": "scale up by one",
    "leave": "scale down by one",
    "leave_named": "scale down by one, a member that is named",
    "scale_to_one": "scale to 1",
    "scale_to_max": "scale to the most",
    "kill": "SIGKILL of a member",
    "kill_rank0": "SIGKILL of rank 0",
    "kill_two": "SIGKILL of two at once",
    "kill_half": "SIGKILL of half of the members, rank 0 among them",
    "kill_in_checkpoint": "SIGKILL of rank 0 while it writes a checkpoint",
    "kill_starting": "SIGKILL of a worker that is starting",
    "kill_joiner": "SIGKILL of a newcomer while it copies its state",
    "pause": "SIGSTOP beyond the hang limit, then SIGCONT",
    "freeze": "SIGSTOP for good",
    "kill_launcher": "SIGKILL of the launcher, which comes back",
}


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table.

    Example:
        >>> print(table(["a", "b"], [[1, 2]]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    lines = [head, ["---"] * len(head), *rows]
    shown = [" | ".join(str(cell) for cell in line) for line in lines]
    return "\n".join(
        f"|{'|'.join(line)}|" if line[0] == "---" else f"| {text} |"
        for line, text in zip(lines, shown, strict=True)
    )


def page_of(
    sections: Mapping[str, Callable[[Mapping[str, Any]], str]], *, head: str, results: Path
) -> str:
    """Return a page of a section for each benchmark, made of the result that is there.

    Args:
        sections: what makes a section of a benchmark's result, by its name.
        head: of the page.
        results: folder of the results.
    """
    parts = [head]
    for name, section in sections.items():
        path = results / f"{name}.json"
        command = f"`python -m benchmarks.{name} --json benchmarks/results/{name}.json`"
        if path.exists():
            parts += [section(json.loads(path.read_text())), f"Measure it again: {command}."]
        else:
            parts.append(f"## {name.capitalize()}\n\nNot measured yet: {command}")
    return "\n\n".join(parts) + "\n"


def pauses(found: dict[str, Any]) -> str:
    """Return the section on the survivors' pauses."""
    parts = [
        "## How long the others pause",
        "A pause is a survivor's longest time between two finished steps around a change, less "
        "its median step. `python -m benchmarks.resize --json benchmarks/results/resize.json`",
    ]
    for size, one in found["sizes"].items():
        rows = [
            [text, one[k]["n"], one[k]["median_ms"], one[k]["max_ms"], one[k]["discarded_steps"]]
            for k, text in _KINDS.items()
            if k in one
        ]
        idle = one["undisturbed"]
        rows.append(["no change at all", idle["n"], idle["median_ms"], idle["max_ms"], 0])
        head = ["change", "times", "median, ms", "longest, ms", "steps made again"]
        parts += [f"**{size} parameters with momentum**", table(head, rows)]
    parts.append(
        "The last row is the noise of the machine, measured in the same way over as many steps "
        "without a change: a longest pause of about its length says nothing of the change."
    )
    ready, restart = found["ready_to_first_step_ms"], found["torchrun"]
    pids = "kept" if found["pids_unchanged"] else "did not keep"
    parts.append(
        f"A newcomer that is ready makes its first step after {ready['median']} ms (longest "
        f"{ready['max']} ms). Survivors {pids} their processes."
    )
    if restart:
        parts.append(
            "torchrun, in the same run and with the same script, restarts all workers at each "
            f"change: no step is finished for {restart['join_gap_s']} s at a join and for "
            f"{restart['kill_gap_s']} s at a kill, each measured once, and what was trained since "
            "the last checkpoint is lost."
        )
    return "\n\n".join(parts)


def joins(found: dict[str, Any]) -> str:
    """Return the section on the parts of a join's pause."""
    rows, parts = found["rows"], found["parts"]
    sections = [
        "## What the pause of a join is made of",
        "One worker trains, and a second one joins. The pause begins when the first has finished "
        "its last step alone, and ends when both are in the new group; a part ends when the last "
        "of the two is through with it. The state is copied in the pause, or the newcomer has "
        "[followed](protocol.md#newcomers-that-follow) before. Medians of "
        f"{min(row['joins'] for row in rows)} joins, in milliseconds. "
        "`python -m benchmarks.joins --json benchmarks/results/joins.json`",
    ]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for size, rate in found["rates"].items():
        own = {(row["way"], row["part"]): row for row in rows if row["size"] == size}
        named = dict.fromkeys(part for _, part in own)
        cells = [
            [
                parts.get(part, part),
                *(
                    f"{own[way, part]['ms_median']} ({own[way, part]['ms_q1']} to "
                    f"{own[way, part]['ms_q3']})"
                    for way in ways
                ),
            ]
            for part in named
        ]
        sections += [
            f"**{size} parameters with momentum, {rate['mib']} MiB of state**",
            table(["part", *(f"state {way}, quartiles" for way in ways)], cells),
            f"The copy moves {rate['copied_gb_s']} GB/s; a plain socket over the same loopback, in "
            f"the same run, {rate['socket_gb_s']} GB/s.",
        ]
    return "\n\n".join(sections)


def steady(found: dict[str, Any]) -> str:
    """Return the section on the price without changes."""
    rows = [[r["ratio"], r["n"], r["median"], f"{r['q1']} to {r['q3']}"] for r in found["rows"]]
    return "\n\n".join(
        [
            "## What it costs while nothing changes",
            "Processor time of a step of two workers under `elastane run`, over that of the same "
            "script under torchrun; the second row is torchrun against itself. "
            "`python -m benchmarks.steady --json benchmarks/results/steady.json`",
            table(["ratio", "pairs", "median", "quartiles"], rows),
        ]
    )


def chaos(found: dict[str, Any]) -> str:
    """Return the section on the long run of random changes."""
    rows = [[text, found["by_kind"].get(kind, 0)] for kind, text in _EVENTS.items()]
    pace = found["wall_s"] / found["events"]
    verdict = [
        ["evaluations on the way, the same on all workers", found["evaluations"]],
        ["samples lost", found["samples_lost"]],
        ["samples repeated", found["samples_repeated"]],
        ["unequal replicas, and other stories that differ", len(found["problems"])],
        ["steps shown as final and made again", found["false_commits"]],
        ["processes left behind", found["orphans"]],
        ["longest stall", f"{found['max_stall_s']} s, after event {found['max_stall_after']}"],
    ]
    return "\n\n".join(
        [
            "## A long run of random changes",
            f"{found['events']} events, one every {pace:.1f} s, in one job on at most "
            f"{found['workers']} workers with a loader process each: {found['generations']} "
            f"generations, {found['committed_steps']} committed steps. Each worker kept a record, "
            "and a process that shares no code with the order of the samples audited them.",
            table(["event", "times"], rows),
            table(["found by the audit", ""], verdict),
            f"Nobody may stall for longer than the hang limit of {found['hang_limit_s']} s and a "
            f"second. `python -m benchmarks.chaos --events {found['events']} --seed "
            f"{found['seed']} --every {found['every_s']} --step-time {found['step_s']}`",
            "![Workers over time, and each wait for the next step](_static/chaos.png)",
        ]
    )


def blackout(found: dict[str, Any]) -> str:
    """Return the section on the death of everybody."""
    rows = [
        ["blackouts", found["kills"]],
        ["of them while a checkpoint was being written", found["in_write"]],
        [
            "steps lost at most, of an interval of " + str(found["interval"]),
            found["max_steps_back"],
        ],
        ["newest checkpoints damaged on purpose, and named", found["named"]],
        ["steps lost at most after damage", found["max_steps_back_damaged"]],
        ["steps made again that came out the same", found["steps_made_again_alike"]],
        ["samples lost or repeated", found["samples_lost"] + found["samples_repeated"]],
        ["processes left behind", found["orphans"]],
        ["accuracy at the end", found["final_accuracy"]],
    ]
    return "\n\n".join(
        [
            "## Everybody killed, again and again",
            "Launcher and all workers are killed with SIGKILL, and the same command goes on. "
            f"`python -m benchmarks.blackout --kills {found['kills']} --seed {found['seed']}`",
            table(["", ""], rows),
        ]
    )


_SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "resize": pauses,
    "joins": joins,
    "steady": steady,
    "chaos": chaos,
    "blackout": blackout,
}


def page(results: Path) -> str:
    """Return the page made of the results in a folder; what is missing is said to be."""
    parts = [_HEAD]
    for name, section in _SECTIONS.items():
        path = results / f"{name}.json"
        missing = f"## {name}\n\nNot measured yet: `python -m benchmarks.{name}`"
        parts.append(section(json.loads(path.read_text())) if path.exists() else missing)
    return "\n\n".join(parts) + "\n"


@click.command()
def main() -> None:
    """Write the page."""
    PAGE.write_text(page(RESULTS))


if __name__ == "__main__":
    main()
