"""Timeline of the last steps: one lane for training and one for generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vapo_megatron.config.phases import EVALUATION, GENERATION, PHASES, REWARD, Span
from vapo_megatron.run.report.html import escape

_LAST_STEPS = 4
_WIDTH, _LEFT, _TOP, _HEIGHT, _GAP = 1200, 70, 22, 34, 10
"""Of the picture, its labels and its lanes. Pixels."""
_SAMPLES = (GENERATION, REWARD, EVALUATION)
"""Phases in which the processes of a colocated run sample and judge."""


def lanes(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page's section; empty: nothing is known of any step.

    Args:
        rows: of timeline.jsonl.
    """
    last = _last(rows)
    if not last:
        return ""
    trainer = [Span(*span) for row in last for span in row["trainer"]]
    sampler = [Span(*span) for row in last for span in row["sampler"]]
    is_disaggregated = bool(sampler)
    if not is_disaggregated:
        sampler = [span for span in trainer if span.phase in _SAMPLES]
        trainer = [span for span in trainer if span.phase not in _SAMPLES]
    begin = _bounds(last[0])[0]
    end = max(span.end for span in (*trainer, *sampler))
    about = (
        "The main trainer and the first rollout worker; a trainer's generation, evaluation and "
        "exchange are the wait for rollout workers. By each machine's own clock."
        if is_disaggregated
        else "The same processes sample and train, by turns."
    )
    scale = (_WIDTH - _LEFT) / max(end - begin, 1e-9)
    shapes = []
    for number, (name, spans) in enumerate((("trains", trainer), ("samples", sampler))):
        top = _TOP + number * (_HEIGHT + _GAP)
        shapes.append(f'<text x="0" y="{top + _HEIGHT / 2 + 4:g}">{name}</text>')
        # A rollout worker may have started before the first trainer's span.
        shapes += [_shape(s, top, begin, scale) for s in spans if s.end > begin]
    for row in last:
        x = _LEFT + scale * (_bounds(row)[0] - begin)
        shapes.append(f'<text x="{x:.1f}" y="12">step {row["step"]}</text>')
        shapes.append(f'<path d="M{x:.1f},{_TOP - 6}v{2 * _HEIGHT + _GAP + 12}"/>')
    seen = {span.phase for span in (*trainer, *sampler)}
    key = "".join(
        f'<span><i style="background: {_color(phase)}"></i>{escape(phase.replace("_", " "))}</span>'
        for phase in PHASES if phase in seen
    )  # fmt: skip
    height = _TOP + 2 * _HEIGHT + _GAP + 8
    return (
        f'<section><h2>Timeline</h2><p class="about">The last steps, {end - begin:,.1f} seconds. '
        f'{about}</p><figure class="chart lanes"><div class="legend">{key}</div>'
        f'<svg viewBox="0 0 {_WIDTH} {height}">{"".join(shapes)}</svg></figure></section>'
    )


def _last(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last steps' rows, as far back as the run was not interrupted."""
    found: list[Mapping[str, Any]] = []
    for row in reversed([row for row in rows if row["trainer"]]):
        if found:
            end, (begin, after) = row["trainer"][-1][3], _bounds(found[-1])
            if len(found) == _LAST_STEPS or begin - end > after - begin:
                break
        found.append(row)
    return found[::-1]


def _bounds(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["trainer"][0][2], row["trainer"][-1][3]


def _shape(span: Span, top: float, begin: float, scale: float) -> str:
    start = max(span.begin, begin)
    x, width = _LEFT + scale * (start - begin), max(scale * (span.end - start), 0.5)
    what = f"{span.phase.replace('_', ' ')} of step {span.step}, {span.end - span.begin:.2f} s"
    return (
        f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_HEIGHT}" '
        f'style="fill: {_color(span.phase)}"><title>{escape(what)}</title></rect>'
    )


def _color(phase: str) -> str:
    return f"var(--{phase.replace('_', '-')}, var(--faint))"
