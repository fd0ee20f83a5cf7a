"""Histograms as SVG, which need no script."""

from __future__ import annotations

from collections.abc import Sequence

from vapo_megatron.run.report.html import escape

_WIDTH, _HEIGHT, _BELOW = 320, 150, 20
_GAP = 0.12
"""Of a bar's room."""

Group = tuple[str, Sequence[float]]
"""A label, and the values of its bars."""


def histogram(
    title: str,
    groups: Sequence[Group],
    *,
    bins: int,
    low: float | None = None,
    high: float | None = None,
) -> str:
    """Return a figure whose bars count values; those of several groups stand on each other.

    Args:
        title: what is counted.
        groups: at least one value in all, and no NaN.
        bins: number of bars, unless all values are the same.
        low, high: ends of the axis; None: the least and the greatest value.
    """
    values = [value for _, some in groups for value in some]
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    bins = bins if high > low else 1
    width = (high - low) / bins
    counts = [_counts(some, low, width, bins) for _, some in groups]
    most = max(map(sum, zip(*counts)))

    bars = []
    for place, of_bin in enumerate(zip(*counts)):
        below = 0
        said = f"{low + place * width:,.4g} to {low + (place + 1) * width:,.4g}"
        for number, count in enumerate(of_bin):
            if count:
                about = f"{groups[number][0]}: {count:,} ({said})"
                bars.append(_bar(place, bins, below / most, count / most, number, about))
            below += count

    legend = "".join(
        f'<i style="background:{_color(number)}"></i>{escape(label)} {len(some):,}&ensp;'
        for number, (label, some) in enumerate(groups)
    )

    # If all values are equal, the axis is one label in the middle.
    axis = [(0, "start", low), (_WIDTH / 2, "middle", (low + high) / 2), (_WIDTH, "end", high)]
    texts = "".join(
        f'<text x="{x:g}" y="{_HEIGHT + 15}" text-anchor="{anchor}">{value:,.3g}</text>'
        for x, anchor, value in (axis if high > low else axis[1:2])
    )
    return (
        f'<figure class="chart"><figcaption><h3>{escape(title)}</h3>'
        f'<div class="legend">{legend}most in a bar: {most:,}</div></figcaption>'
        f'<svg class="bars" viewBox="0 0 {_WIDTH} {_HEIGHT + _BELOW}" role="img" '
        f'aria-label="{escape(title)}">{"".join(bars)}'
        f'<path d="M0,{_HEIGHT}h{_WIDTH}"/>{texts}</svg></figure>'
    )


def _counts(values: Sequence[float], low: float, width: float, bins: int) -> list[int]:
    """Count values by bin; the last one has its upper end."""
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / width)) if width else 0] += 1
    return counts


def _bar(place: int, bins: int, below: float, share: float, group: int, about: str) -> str:
    room = _WIDTH / bins
    x, top = (place + _GAP / 2) * room, _HEIGHT * (1 - below - share)
    return (
        f'<rect x="{x:.2f}" y="{top:.2f}" width="{room * (1 - _GAP):.2f}" '
        f'height="{_HEIGHT * share:.2f}" style="fill:{_color(group)}">'
        f"<title>{escape(about)}</title></rect>"
    )


def _color(group: int) -> str:
    return ("var(--series0)", "var(--faint)", "var(--series1)")[group]
