"""Questions that the tokens of the kept responses answer: points of a few plots.

All are of the last steps of which responses were kept, and of the kept responses alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vapo_megatron.run_directory import Run

_LAST_STEPS = 5
_PARTS = 10
"""Bins of the position in a response, and of its length."""

_Group = Mapping[str, Any]
_Pair = tuple[float, float]


def plots(run: Run) -> list[dict[str, Any]]:
    """Return the plots that can be drawn: title, what x and y are, and series of [x, y]."""
    groups = [g for step in run.rollout_steps[-_LAST_STEPS:] for g in run.rollouts(step)]
    groups = [g for g in groups if all("tokens" in r for r in g["responses"])]
    responses = [r for g in groups for r in g["responses"] if r["tokens"]["pieces"]]
    if not responses:
        return []
    gamma = (run.config.get("algorithm") or {}).get("gamma", 1.0)
    has_critic = all("values" in r["tokens"] for r in responses)
    right = [r for r in responses if r["status"] == "correct"]
    other = [r for r in responses if r["status"] != "correct"]
    kinds = [("correct", right), ("not correct", other)]
    where = "position in the response"
    found = [
        _plot("Does the critic foresee how a response ends?", where, "value and return", [
            series for name, some in kinds if has_critic for series in (
                (f"value, {name}", _by_part(_values(some, "values"))),
                (f"return, {name}", _by_part(_returns(some, gamma))),
            )
        ]),
        _plot("Which part of a response is praised or blamed?", where, "mean advantage",
              [(name, _by_part(_values(some, "advantages"))) for name, some in kinds]),
        _plot("Which lengths weigh in the loss?", "response length (tokens)", "share of the loss",
              _shares([r["num_tokens"] for r in responses])),
        _plot("Is the policy unsure where responses of a group part?", where, "entropy (nat)", [
            (name, _by_part(pairs)) for name, pairs in
            zip(("where they part", "elsewhere"), _entropies(groups))
        ]),
    ]  # fmt: skip
    return [plot for plot in found if plot["series"]]


def _plot(title: str, x: str, y: str, series: Sequence[tuple[str, list]]) -> dict[str, Any]:
    kept = [{"label": name, "points": points} for name, points in series if points]
    return {"title": title, "x": x, "y": y, "series": kept}


def _indices(response: Mapping[str, Any]) -> Iterable[int]:
    """Where each kept token stands in the response; of a long one both ends are kept."""
    held, length = len(response["tokens"]["pieces"]), response["num_tokens"]
    half = held if held == length else held // 2
    return [*range(half), *range(length - held + half, length)]


def _values(responses: Sequence[Mapping[str, Any]], name: str) -> Iterable[_Pair]:
    """(position in 0..1, number) of each kept token whose number is finite."""
    for r in responses:
        for at, number in zip(_indices(r), r["tokens"][name]):
            if number is not None:
                yield (at + 0.5) / r["num_tokens"], number


def _returns(responses: Sequence[Mapping[str, Any]], gamma: float) -> Iterable[_Pair]:
    """As _values, of the return: the reward stands on the last token."""
    for r in responses:
        length = r["num_tokens"]
        for at in _indices(r):
            yield (at + 0.5) / length, r["reward"] * gamma ** (length - 1 - at)


def _by_part(pairs: Iterable[_Pair]) -> list[list[float]]:
    """[middle of a tenth, mean there] of the tenths that hold something."""
    parts: list[list[float]] = [[] for _ in range(_PARTS)]
    for x, y in pairs:
        parts[min(_PARTS - 1, int(x * _PARTS))].append(y)
    return [[(i + 0.5) / _PARTS, sum(p) / len(p)] for i, p in enumerate(parts) if p]


def _shares(lengths: Sequence[int]) -> list[tuple[str, list]]:
    """Share of responses by length under a mean over tokens, and over responses' means."""
    width = max(1, -(-max(lengths) // _PARTS))
    bins = range(1, max(lengths) + 1, width)
    of_bin = [[n for n in lengths if low <= n < low + width] for low in bins]
    middles = [low + (width - 1) / 2 for low in bins]
    total = sum(lengths)
    return [
        ("token-level", [[x, sum(some) / total] for x, some in zip(middles, of_bin)]),
        ("sample-level", [[x, len(some) / len(lengths)] for x, some in zip(middles, of_bin)]),
    ]


def _entropies(groups: Sequence[_Group]) -> tuple[list[_Pair], list[_Pair]]:
    """(position, entropy) of tokens at which responses with one beginning differ; of the others."""
    part: list[_Pair] = []
    rest: list[_Pair] = []
    for group in groups:
        # What begins alike, and how many tokens of it are alike.
        todo = [([(r, list(_indices(r))) for r in group["responses"]], 0)]
        while todo:
            members, i = todo.pop()
            members = [(r, at) for r, at in members if i < len(at)]
            follow: dict[tuple[str, int], list[Any]] = {}
            for r, at in members:
                follow.setdefault((r["tokens"]["pieces"][i], at[i]), []).append((r, at))
            for r, at in members:
                entropy = r["tokens"]["entropy"][i]
                if entropy is not None:
                    # Past the gap of a long response, at[i] > i, nobody knows what is alike.
                    parts = len(follow) > 1 and at[i] == i
                    (part if parts else rest).append(((at[i] + 0.5) / r["num_tokens"], entropy))
            todo += [(alike, i + 1) for alike in follow.values()]
    return part, rest
