"""Questions that the kept responses' tokens, and all problems' pass rates, answer: points of plots.

What is said of tokens is of the last steps of which responses were kept, and of these alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vapo_megatron.algorithm.lambdas import resolve_lambdas
from vapo_megatron.config.techniques import settings
from vapo_megatron.run.directory import Run
from vapo_megatron.run.report.html import spread
from vapo_megatron.run.report.problems import problem_plots

_LAST_STEPS = 5
_PARTS = 10
"""Bins of the position in a response, of its length, and of the values."""

_Group = Mapping[str, Any]
_Response = Mapping[str, Any]
_Pair = tuple[float, float]
_Bin = tuple[float, list[float]]
_Series = tuple[str, list[list[float]]]


class _Token(NamedTuple):
    """One kept token, and one number of it."""

    number: float
    place: float
    """In the response, 0 to 1."""
    length: int
    """Of the response."""
    outcome: float
    """The return: the reward stands on the last token."""


def plots(run: Run) -> list[dict[str, Any]]:
    """Return the plots that can be drawn: title, what x and y are, series of [x, y] or cells."""
    groups = [g for step in run.rollout_steps[-_LAST_STEPS:] for g in run.rollouts(step)]
    groups = [g for g in groups if all("tokens" in r for r in g["responses"])]
    # Without config.yaml nobody knows what the tokens were trained for.
    of_tokens = _token_plots(groups, settings(run.config)) if run.config else ()
    found = [*of_tokens, *problem_plots(run.problems(), run.held_out())]
    return [plot for plot in found if plot.get("series") or plot.get("cells")]


def _token_plots(
    groups: Sequence[_Group], algorithm: Mapping[str, Any]
) -> Iterable[dict[str, Any]]:
    responses = [r for g in groups for r in g["responses"] if r["tokens"]["pieces"]]
    if not responses:
        return
    right = [r for r in responses if r["status"] == "correct"]
    other = [r for r in responses if r["status"] != "correct"]
    kinds = [("correct", right), ("not correct", other)]
    where, length = "position in the response", "response length (tokens)"
    longest = max(r["num_tokens"] for r in responses)
    if all("values" in r["tokens"] for r in responses):
        by_kind = [(name, _tokens(some, "values", algorithm["gamma"])) for name, some in kinds]
        tokens = [t for _, some in by_kind for t in some]
        fields = (("value", "number"), ("return", "outcome"))
        yield _plot("Does the critic foresee how a response ends?", where, "value and return", [
            (f"{what}, {name}", _by_part([(t.place, getattr(t, field)) for t in some]))
            for name, some in by_kind for what, field in fields
        ])  # fmt: skip
        yield _plot("Does the critic know what short and long responses earn?", length,
                    "value and return", [
            ("value", _by_length([(t.length, t.number) for t in tokens], longest)),
            ("return", _by_length([(t.length, t.outcome) for t in tokens], longest)),
        ])  # fmt: skip
        yield _plot("When the critic names a value, does that come?", "value", "return", [
            ("what came", _by_value([(t.number, t.outcome) for t in tokens])),
            ("what it named", _by_value([(t.number, t.number) for t in tokens])),
        ])  # fmt: skip
    yield _plot("Which part of a response is praised or blamed?", where, "mean advantage", [
        (name, _by_part([(t.place, t.number) for t in _tokens(some, "advantages")]))
        for name, some in kinds
    ])  # fmt: skip
    if algorithm["advantage_estimator"] == "gae":
        yield _plot("How far back does the reward reach?", length, "lambda and what comes of it",
                    _lambdas(algorithm, longest), low=0, high=1)  # fmt: skip
    yield _plot("Which lengths weigh in the loss?", length, "share of the loss",
                _shares(responses, algorithm), low=0)  # fmt: skip
    yield _plot("Is the policy unsure where responses of a group part?", where, "entropy (nat)", [
        (name, _by_part(pairs)) for name, pairs in
        zip(("where they part", "elsewhere"), _entropies(groups))
    ], low=0)  # fmt: skip


def _plot(title: str, x: str, y: str, series: Sequence[_Series], **axis: float) -> dict[str, Any]:
    kept = [{"label": name, "points": points} for name, points in series if points]
    return {"title": title, "x": x, "y": y, "series": kept, **axis}


def _indices(response: _Response) -> list[int]:
    """Where each kept token stands in the response; of a long one both ends are kept."""
    held, length = len(response["tokens"]["pieces"]), response["num_tokens"]
    half = held if held == length else held // 2
    return [*range(half), *range(length - held + half, length)]


def _tokens(responses: Sequence[_Response], name: str, gamma: float = 1.0) -> list[_Token]:
    """Each kept token whose number is finite."""
    return [
        _Token(number, (at + 0.5) / length, length, r["reward"] * gamma ** (length - 1 - at))
        for r in responses
        if (length := r["num_tokens"])
        for at, number in zip(_indices(r), r["tokens"][name])
        if number is not None
    ]


def _bins(pairs: Iterable[_Pair], low: float, high: float, parts: int) -> list[_Bin]:
    """(middle, every y there) of each of the parts between low and high."""
    width = (high - low) / parts
    bins: list[list[float]] = [[] for _ in range(parts)]
    for x, y in pairs:
        bins[min(parts - 1, int((x - low) / width))].append(y)
    return [(round(low + (i + 0.5) * width, 6), found) for i, found in enumerate(bins)]


def _means(bins: Iterable[_Bin]) -> list[list[float]]:
    return [[middle, sum(found) / len(found)] for middle, found in bins if found]


def _by_part(pairs: Iterable[_Pair]) -> list[list[float]]:
    return _means(_bins(pairs, 0.0, 1.0, _PARTS))


def _by_length(pairs: Iterable[_Pair], longest: int) -> list[list[float]]:
    return _means(_bins_of_lengths(pairs, longest))


def _bins_of_lengths(pairs: Iterable[_Pair], longest: int) -> list[_Bin]:
    return _bins(pairs, 0.5, longest + 0.5, min(_PARTS, longest))


def _by_value(pairs: Sequence[_Pair]) -> list[list[float]]:
    values = [value for value, _ in pairs]
    if not values or min(values) == max(values):
        return []
    return _means(_bins(pairs, min(values), max(values), _PARTS))


def _lambdas(algorithm: Mapping[str, Any], longest: int) -> list[_Series]:
    """Lambda by length, and what GAE leaves of the reward at a response's first token."""
    lengths = np.array(spread(range(1, longest + 1), 41))
    names = ("lambda_actor", "lambda_critic", "length_adaptive_alpha")
    actor, critic = resolve_lambdas(lengths, **{name: algorithm[name] for name in names})
    left = (algorithm["gamma"] * actor) ** (lengths - 1)

    def by_length(numbers: Any) -> list[list[float]]:
        return np.stack(np.broadcast_arrays(lengths, numbers), axis=1).tolist()

    return [
        ("actor's lambda", by_length(actor)),
        ("critic's lambda", by_length(critic)),
        ("of the reward in the first token's advantage", by_length(left)),
    ]


def _shares(responses: Sequence[_Response], algorithm: Mapping[str, Any]) -> list[_Series]:
    """Share of the responses of a length if all tokens weigh the same, and if all responses do."""
    filtered = algorithm["overlong_filtering"]
    lengths = [r["num_tokens"] for r in responses if not (filtered and r["truncated"])]
    longest, total = max(lengths, default=0), sum(lengths)
    if not longest:
        return []
    bins = _bins_of_lengths([(n, n) for n in lengths], longest)
    here = " (this run)"
    token, sample = ("", here) if algorithm["loss_aggregation"] == "sample" else (here, "")
    return [
        (f"token-level{token}", [[x, sum(found) / total] for x, found in bins]),
        (f"sample-level{sample}", [[x, len(found) / len(lengths)] for x, found in bins]),
    ]


def _entropies(groups: Sequence[_Group]) -> tuple[list[_Pair], list[_Pair]]:
    """(position, entropy) of tokens at which responses with one beginning differ; of the others."""
    part: list[_Pair] = []
    rest: list[_Pair] = []
    for group in groups:
        # What begins alike, and how many tokens of it are alike.
        todo = [([(r, _indices(r)) for r in group["responses"]], 0)]
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
