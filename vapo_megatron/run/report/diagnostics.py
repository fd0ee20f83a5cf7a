"""Plots that answer questions about the kept responses' tokens and all problems' pass rates.

Those about tokens use the last steps with kept responses, and no other responses.
"""

from __future__ import annotations

import bisect
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

_Response = Mapping[str, Any]
_Pair = tuple[float, float]
_Series = tuple[str, list[list[float]]]
_POSITION, _LENGTH = "position in the response", "response length (tokens)"
_TURNS = "turns of an episode"


class _Token(NamedTuple):
    """One kept token, and one number of it."""

    number: float
    place: float
    """In the response, 0 to 1."""
    length: int
    """Of the response."""
    outcome: float
    """The return: the reward is on the last token, a turn's own on that of its action."""


def plots(run: Run) -> list[dict[str, Any]]:
    """Return the plots that can be drawn: title, what x and y are, series of [x, y] or cells."""
    groups = [g for step in run.rollout_steps[-_LAST_STEPS:] for g in run.rollouts(step)]
    kept = [g["responses"] for g in groups if all("tokens" in r for r in g["responses"])]
    found = [*problem_plots(run.problems(), run.problems(held_out=True))]
    if run.config:  # otherwise the algorithm is unknown
        found = [*_token_plots(kept, settings(run.config)), *found]
    return [plot for plot in found if plot.get("series") or plot.get("cells")]


def _token_plots(
    groups: Sequence[Sequence[_Response]], algorithm: Mapping[str, Any]
) -> Iterable[dict[str, Any]]:
    responses = [r for group in groups for r in group if r["tokens"]["pieces"]]
    if not responses:
        return
    kinds = [
        ("correct", [r for r in responses if r["status"] == "correct"]),
        ("not correct", [r for r in responses if r["status"] != "correct"]),
    ]
    longest = max(r["num_tokens"] for r in responses)
    if all("values" in r["tokens"] for r in responses):
        yield from _critic_plots(kinds, longest, algorithm)
    if all("advantages" in r["tokens"] for r in responses):
        title = "Which parts of a response have a high advantage?"
        yield _plot(title, _POSITION, "mean advantage", [
            (name, _by_position([(t.place, t.number) for t in _tokens(some, "advantages")]))
            for name, some in kinds
        ])  # fmt: skip
    if algorithm["advantage_estimator"] == "gae":
        by_turn = algorithm["gae_unit"] == "turn"
        most = max(len(r.get("turns") or "1") for r in responses) if by_turn else longest
        reach = "How far back does the reward reach?", _TURNS if by_turn else _LENGTH
        lambdas = _lambdas(algorithm, most)
        yield _plot(*reach, "lambda, share of the reward", lambdas, low=0, high=1)
    yield _plot("Which response lengths dominate the loss?", _LENGTH, "share of the loss",
                _shares(responses, algorithm), low=0)  # fmt: skip
    if not all("entropy" in r["tokens"] for r in responses):
        return
    diverging, others = _entropies(groups)
    yield _plot("Is the policy uncertain where responses of a group diverge?", _POSITION,
                "entropy (nat)", [
        ("where they diverge", _by_position(diverging)), ("elsewhere", _by_position(others)),
    ], low=0)  # fmt: skip


def _critic_plots(
    kinds: Sequence[tuple[str, Sequence[_Response]]], longest: int, algorithm: Mapping[str, Any]
) -> Iterable[dict[str, Any]]:
    by_kind = [(name, _tokens(some, "values", algorithm)) for name, some in kinds]
    tokens = [t for _, some in by_kind for t in some]
    fields = (("value", "number"), ("return", "outcome"))
    yield _plot("Does the critic predict how a response ends?", _POSITION, "value and return", [
        (f"{what}, {name}", _by_position([(t.place, getattr(t, field)) for t in some]))
        for name, some in by_kind for what, field in fields
    ])  # fmt: skip
    yield _plot("Does the critic predict returns at every length?", _LENGTH, "value and return", [
        (what, _means(_by_length([(t.length, getattr(t, field)) for t in tokens], longest)))
        for what, field in fields
    ])  # fmt: skip
    yield _plot("Is the critic calibrated?", "value", "return", [
        ("mean return", _by_value([(t.number, t.outcome) for t in tokens])),
        ("mean value", _by_value([(t.number, t.number) for t in tokens])),
    ])  # fmt: skip


def _plot(title: str, x: str, y: str, series: Sequence[_Series], **axis: float) -> dict[str, Any]:
    kept = [{"label": name, "points": points} for name, points in series if points]
    return {"title": title, "x": x, "y": y, "series": kept, **axis}


def _indices(response: _Response) -> list[int]:
    """Index in the response of each kept token; of a long one both ends are kept."""
    held, length = len(response["tokens"]["pieces"]), response["num_tokens"]
    half = held if held == length else held // 2
    return [*range(half), *range(length - held + half, length)]


def _tokens(
    responses: Sequence[_Response], name: str, algorithm: Mapping[str, Any] | None = None
) -> list[_Token]:
    """Return each kept token whose number is finite; without an algorithm its outcome is 0."""
    found = []
    for r in responses:
        length, indices = r["num_tokens"], _indices(r)
        outcomes = _returns(r, indices, algorithm) if algorithm else [0.0] * len(indices)
        found += [
            _Token(number, (at + 0.5) / length, length, outcome)
            for at, number, outcome in zip(indices, r["tokens"][name], outcomes)
            if number is not None
        ]
    return found


def _returns(r: _Response, indices: Sequence[int], algorithm: Mapping[str, Any]) -> list[float]:
    """Return the discounted rewards of each of these tokens and of those after it."""
    gamma, turns = algorithm["gamma"], r.get("turns") or ()
    earned = [(turn["end"] - 1, turn["reward"]) for turn in turns]
    rest = r["reward"] - sum(reward for _, reward in earned)
    rewards = [*earned, (r["num_tokens"] - 1, rest)]
    ends = [turn["end"] for turn in turns]

    def time(token: int) -> int:
        return bisect.bisect_right(ends, token) if algorithm["gae_unit"] == "turn" else token

    return [
        sum(reward * gamma ** (time(place) - time(at)) for place, reward in rewards if place >= at)
        for at in indices
    ]


def _bins(
    pairs: Iterable[_Pair], low: float, high: float, parts: int = _PARTS
) -> list[tuple[float, list[float]]]:
    """Return (middle, every y in it) of each of the parts between low and high."""
    width = (high - low) / parts
    bins: list[list[float]] = [[] for _ in range(parts)]
    for x, y in pairs:
        bins[min(parts - 1, int((x - low) / width))].append(y)
    return [(round(low + (i + 0.5) * width, 6), found) for i, found in enumerate(bins)]


def _by_length(pairs: Iterable[_Pair], longest: int) -> list[tuple[float, list[float]]]:
    return _bins(pairs, 0.5, longest + 0.5, min(_PARTS, longest))


def _means(bins: Iterable[tuple[float, list[float]]]) -> list[list[float]]:
    return [[middle, sum(found) / len(found)] for middle, found in bins if found]


def _by_position(pairs: Iterable[_Pair]) -> list[list[float]]:
    return _means(_bins(pairs, 0.0, 1.0))


def _by_value(pairs: Sequence[_Pair]) -> list[list[float]]:
    values = [value for value, _ in pairs]
    if not values or min(values) == max(values):
        return []
    return _means(_bins(pairs, min(values), max(values)))


def _lambdas(algorithm: Mapping[str, Any], longest: int) -> list[_Series]:
    """Lambda by length, and what GAE leaves of the last reward at a response's first token.

    longest: in tokens, or turns where GAE's steps are turns.
    """
    unit = algorithm["gae_unit"]
    lengths = np.array(spread(range(1, longest + 1), 41))
    names = ("lambda_actor", "lambda_critic", "length_adaptive_alpha")
    actor, critic = resolve_lambdas(lengths, **{name: algorithm[name] for name in names})
    left = (algorithm["gamma"] * actor) ** (lengths - 1)
    curves = (
        ("actor's lambda", actor),
        ("critic's lambda", critic),
        (f"share of the reward in the first {unit}'s advantage", left),
    )
    return [
        (name, np.stack(np.broadcast_arrays(lengths, numbers), axis=1).tolist())
        for name, numbers in curves
    ]


def _shares(responses: Sequence[_Response], algorithm: Mapping[str, Any]) -> list[_Series]:
    """Return each length's share of the loss if all tokens weigh the same; if all responses do."""
    filtered = algorithm["overlong_filtering"]
    lengths = [r["num_tokens"] for r in responses if not (filtered and r["truncated"])]
    longest, total = max(lengths, default=0), sum(lengths)
    if not longest:
        return []
    bins = _by_length([(n, n) for n in lengths], longest)
    here = " (this run)"
    token, sample = ("", here) if algorithm["loss_aggregation"] == "sample" else (here, "")
    return [
        (f"token-level{token}", [[x, sum(found) / total] for x, found in bins]),
        (f"sample-level{sample}", [[x, len(found) / len(lengths)] for x, found in bins]),
    ]


def _entropies(groups: Sequence[Sequence[_Response]]) -> tuple[list[_Pair], list[_Pair]]:
    """Return (position, entropy) of tokens at which responses with one prefix differ; of others."""
    diverging: list[_Pair] = []
    others: list[_Pair] = []
    for group in groups:
        # Responses with a common prefix, and how many tokens it has.
        todo = [([(r, _indices(r)) for r in group], 0)]
        while todo:
            members, i = todo.pop()
            members = [(r, at) for r, at in members if i < len(at)]
            follow: dict[tuple[str, int], list[Any]] = {}
            for r, at in members:
                follow.setdefault((r["tokens"]["pieces"][i], at[i]), []).append((r, at))
            for r, at in members:
                entropy = r["tokens"]["entropy"][i]
                if entropy is not None:
                    # Past the gap of a long response, at[i] > i, the prefixes are unknown.
                    diverges = len(follow) > 1 and at[i] == i
                    point = (at[i] + 0.5) / r["num_tokens"], entropy
                    (diverging if diverges else others).append(point)
            todo += [(alike, i + 1) for alike in follow.values()]
    return diverging, others
