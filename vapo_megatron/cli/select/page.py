"""The page beside a selection: histograms of what was measured, what each rule dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.cli.select.duplicates import Duplicate
from vapo_megatron.cli.select.rules import Measured, Selection
from vapo_megatron.data.problems import Problem
from vapo_megatron.run.report.comparison import table
from vapo_megatron.run.report.histogram import histogram
from vapo_megatron.run.report.html import card, escape, visible, write_page, yaml_value

_BINS, _PAIRS, _CHARACTERS = 20, 20, 300
_ARROW = " <i>&rarr;</i> "


def write_selection_page(
    page: Path,
    *,
    out: Path,
    samples: Path,
    header: Mapping[str, Any],
    problems: Sequence[Problem],
    duplicates: Mapping[int, Duplicate],
    measured: Mapping[int, Measured],
    selection: Selection,
) -> Path:
    """Write the page and return it.

    Args:
        page: replaced atomically.
        out, samples: the selection's and the samples' files, to be named.
        header: the samples' settings.
        problems: of the whole file.
        duplicates, measured: by index in problems.
        selection: some of the measured ones.
    """
    slots = {
        "kind": "Selection",
        "title": escape(out.name),
        "subtitle": escape(f"{header['data']}, sampled with {header['checkpoint']}"),
        "data": "{}",
        "headline": "".join(_headline(len(problems), measured, selection.kept)),
        "about": escape(_about(header["samples"], measured)),
        "histograms": "".join(_histograms(header["samples"], measured, selection.kept)),
        "rules": _rules(len(problems), selection),
        "duplicates": _duplicates(problems, duplicates),
        "settings": table(["value"], [(k, [escape(yaml_value(v))]) for k, v in header.items()]),
        "out": escape(out.name),
        "samples": escape(samples.name),
    }
    return write_page(page, "report_selection.html", slots, has_script=False)


def _headline(
    num_problems: int, measured: Mapping[int, Measured], kept: Sequence[int]
) -> Sequence[str]:
    def both(name: str, form: str) -> str:
        means = []
        for indices in (measured, kept):
            values = [v for i in indices if (v := getattr(measured[i], name)) is not None]
            means.append(format(sum(values) / len(values), form) if values else "-")
        return _ARROW.join(means)

    note = "mean over all prompts sampled, and over those kept"
    return [
        card("Prompts", f"{num_problems:,}{_ARROW}{len(kept):,}", "read, and kept"),
        card("Pass rate", both("pass_rate", ".3f"), note),
        card("Score", both("score_mean", ".3g"), note),
        card("Response length", both("length_mean", ",.0f"), note),
    ]


def _about(samples: int, measured: Mapping[int, Measured]) -> str:
    failed = sum(m.scores.count(None) for m in measured.values())
    lacking = f" {failed:,} verdicts failed or timed out and give no score." if failed else ""
    return f"Each prompt counts once, with the mean of its {samples} responses.{lacking}"


def _histograms(
    samples: int, measured: Mapping[int, Measured], kept: Sequence[int]
) -> Sequence[str]:
    chosen = set(kept)
    rest = [i for i in measured if i not in chosen]

    def of(name: str) -> list[tuple[str, list[float]]]:
        return [
            (label, [v for i in indices if (v := getattr(measured[i], name)) is not None])
            for label, indices in (("kept", kept), ("left out", rest))
        ]

    scores = of("score_mean")
    figures = [
        # A bar for each of the possible rates, if they are few.
        histogram("Pass rate", of("pass_rate"), bins=min(samples + 1, _BINS), low=0, high=1),
        histogram("Mean response length (tokens)", of("length_mean"), bins=_BINS),
        histogram("Truncated responses (share)", of("truncated_fraction"), bins=_BINS, low=0,
                  high=1),
    ]  # fmt: skip
    if any(values for _, values in scores):
        figures.insert(1, histogram("Mean score", scores, bins=_BINS))
    return figures


def _rules(num_problems: int, selection: Selection) -> str:
    rows = [("prompts read", [f"{num_problems:,}"])]
    rows += [(f"dropped: {rule}", [f"{n:,}"]) for rule, n in selection.dropped.items()]
    return table(["prompts"], [*rows, ("kept", [f"<b>{len(selection.kept):,}</b>"])])


def _duplicates(problems: Sequence[Problem], duplicates: Mapping[int, Duplicate]) -> str:
    """Return the least similar ones that were dropped: where the rule may be too strict."""
    if not duplicates:
        return ""
    pairs = sorted(duplicates.items(), key=lambda pair: (pair[1].similarity, pair[0]))[:_PAIRS]
    boxes = "".join(
        f'<div class="caption">similarity {found.similarity:.3f}: row {index} repeats row '
        f"{found.of} (from 0)</div><pre>{_shortened(problems[index])}</pre>"
        f"<pre>{_shortened(problems[found.of])}</pre>"
        for index, found in pairs
    )
    return (
        f'<h2>Near-duplicates</h2><p class="about">The {len(pairs)} least similar of '
        f"{len(duplicates):,}: what was dropped, and what it repeats.</p>{boxes}"
    )


def _shortened(problem: Problem) -> str:
    text = problem.prompt
    if len(text) > _CHARACTERS:
        text = f"{text[: _CHARACTERS // 2]} ... {text[-_CHARACTERS // 2 :]}"
    return escape(visible(text))
