"""Who judges responses, and the rewards of the verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from vapo_megatron.config.metrics import LABEL
from vapo_megatron.config.section import Section
from vapo_megatron.config.section import field as _field

REWARD_MODEL = "reward_model"
ENVIRONMENT = "environment"
"""The verdicts and rewards of the section environment are all there is."""
BUILT_IN_VERIFIERS = (
    "math", "exact", "code", "reasoning_gym", "judge", "pairwise", REWARD_MODEL, ENVIRONMENT,
)  # fmt: skip
"""Names of reward.verifier; reward/built_in.py builds them."""
HYBRID = "hybrid"
"""Stands for the first of reward.hybrid that accepts a row; reward/hybrid.py has the rule."""


class ScaleConfig(Section):
    """How a verifier's scores become rewards in the range of from_score."""

    mean: float | None = _field(
        None, "With std: the reward is (score - mean) / std, clipped to from_score."
    )
    std: float | None = _field(None, "Standard deviation of the verifier's scores.", gt=0)
    low: float | None = _field(
        None,
        "With high: the range of the scores, which is mapped to from_score; a score outside is a "
        "failed verdict.",
    )
    high: float | None = _field(None, "Upper end of the range.")
    correct_from: float | None = _field(
        None,
        "The least score of a correct response, before scaling; null: reward.correct_from, after "
        "scaling.",
    )
    correct: float | None = _field(
        None, "Reward of a correct verdict without a score; null: from_score's high."
    )
    incorrect: float | None = _field(
        None, "Reward of any other verdict without a score; null: from_score's low."
    )
    truncated_correct: float | None = _field(
        None, "As correct, of a response truncated by a length limit; null: correct."
    )


class RewardConfig(Section):
    """Who judges, and the rewards of the verdicts."""

    verifier: str = _field(
        "math",
        "Judges responses: a built-in verifier, a name of reward.verifiers, hybrid, or your own "
        "function or class, package.module:NAME or path/to/file.py:NAME. A row of the data with a "
        "column `verifier` names its own.",
    )
    hybrid: list[str] = _field(
        [],
        "Verifiers in order: a row whose verifier is hybrid is judged by the first that accepts "
        "it.",
    )
    verifiers: dict[str, dict[str, Any]] = _field(
        {},
        "Options of verifiers by name; `use` is a built-in one, package.module:NAME or "
        "path/to/file.py:NAME, by default the name itself; the others are passed to it.",
    )
    correct: float = _field(1.0, "Reward of a correct response.")
    incorrect: float = _field(-1.0, "Reward of any other response.")
    truncated_correct: float = _field(
        -1.0, "Reward of a response with the correct answer that was truncated by a length limit."
    )
    overlong_buffer_tokens: int = _field(
        0,
        "Soft overlong punishment: applies to this many tokens before max_response_tokens; 0: off.",
        "L_cache",
        ge=0,
    )
    overlong_penalty: float = _field(1.0, "Largest soft overlong punishment.", ge=0)
    from_score: list[float] | None = _field(
        None,
        "[low, high]: the reward is the verdict's score, which must lie in this range; where a "
        "verdict has none, high if it is correct, else low. null: the values above.",
    )
    correct_from: float | None = _field(
        None,
        "With from_score: the least score of a correct response; null: the verdict's own status.",
    )
    scales: dict[str, ScaleConfig] = _field(
        {}, "With from_score: the scale of a verifier's scores, by its name."
    )
    num_workers: int = _field(2, "Verifier processes per inference engine.", ge=1)
    timeout_seconds: float = _field(
        5.0, "Time limit for verifying one response; code, judge and pairwise have their own.", gt=0
    )
    memory_gb: float = _field(
        4.0,
        "Memory of a verifier's process beyond what loading it took, in 1e9 bytes; not of math's, "
        "which has a limit of its own.",
        gt=0,
    )
    max_failed_fraction: float = _field(
        0.5,
        "Stop the run when more than this fraction of a step's verdicts failed or timed out.",
        ge=0,
        le=1,
    )

    def use_of(self, name: str) -> Any:
        """Return what a verifier's name stands for: a built-in one, or a user's module:NAME."""
        return self.verifiers.get(name, {}).get("use", name)

    @property
    def names(self) -> tuple[str, ...]:
        """What a row may name: the built-in verifiers, the configured ones, and hybrid."""
        return (*dict.fromkeys([*BUILT_IN_VERIFIERS, *self.verifiers]), HYBRID)


def reward_range(reward: RewardConfig) -> tuple[float, float]:
    """Return the lowest and the highest reward that a response can get."""
    rewards = tuple(
        reward.from_score or (reward.correct, reward.incorrect, reward.truncated_correct)
    )
    punishment = reward.overlong_penalty if reward.overlong_buffer_tokens else 0.0
    return min(rewards) - punishment, max(rewards)


def reward_mistakes(reward: RewardConfig) -> Iterator[str]:
    """Yield what is wrong with the section by itself: field, value, rule and remedy."""
    yield from _verifier_mistakes(reward)
    yield from _hybrid_mistakes(reward)
    yield from _score_mistakes(reward)
    for name, scale in reward.scales.items():
        yield from _scale_mistakes(reward, name, scale)


def _verifier_mistakes(reward: RewardConfig) -> Iterator[str]:
    names = ", ".join(sorted(reward.names))
    if reward.verifier not in reward.names and ":" not in reward.verifier:
        yield (
            f"reward.verifier={reward.verifier} must be one of {names}, or package.module:NAME or "
            "path/to/file.py:NAME of a function or class; change it"
        )
    for name, options in reward.verifiers.items():
        use = options.get("use", name)
        if name == HYBRID:
            yield f"reward.verifiers.{HYBRID} has no options; set reward.hybrid in its place"
        if not re.fullmatch(LABEL, name):
            yield (
                f"reward.verifiers.{name}: a name must have letters, digits and the characters "
                "_ . : - alone, because metrics have it in theirs; rename it"
            )
        if use not in BUILT_IN_VERIFIERS and not (isinstance(use, str) and ":" in use):
            yield (
                f"reward.verifiers.{name}.use={use!r} must be one of "
                f"{', '.join(BUILT_IN_VERIFIERS)}, or package.module:NAME or path/to/file.py:NAME "
                "of a function or class; set it"
            )


def _hybrid_mistakes(reward: RewardConfig) -> Iterator[str]:
    if reward.verifier == HYBRID and not reward.hybrid:
        yield (
            "reward.hybrid=[] must name the verifiers that reward.verifier=hybrid chooses among, "
            "such as [code, math]; set it"
        )
    known = [name for name in reward.names if name != HYBRID]
    for i, name in enumerate(reward.hybrid):
        if name not in known or name in reward.hybrid[:i]:
            yield (
                f"reward.hybrid={reward.hybrid} must name each of {', '.join(known)} once at most, "
                f"found {name}; change it"
            )
        elif reward.use_of(name) == REWARD_MODEL and name != reward.hybrid[-1]:
            yield (
                f"reward.hybrid={reward.hybrid}: {name}, a reward model, accepts every row, so "
                "nothing would be left for the others; put it last"
            )


def _score_mistakes(reward: RewardConfig) -> Iterator[str]:
    bounds = reward.from_score
    if bounds is not None and not (len(bounds) == 2 and bounds[0] < bounds[1]):
        yield (
            f"reward.from_score={bounds} must be [low, high] with low below high, such as [0, 1]; "
            "change it, or set it to null"
        )
    if reward.correct_from is not None and bounds is None:
        yield (
            f"reward.correct_from={reward.correct_from:g} needs reward.from_score, the range of "
            "scores; set it, or set correct_from to null"
        )


def _scale_mistakes(reward: RewardConfig, name: str, scale: ScaleConfig) -> Iterator[str]:
    field, bounds = f"reward.scales.{name}", reward.from_score
    known = [n for n in dict.fromkeys([*reward.names, reward.verifier]) if n != HYBRID]
    if name not in known:
        yield f"{field} must be the scale of one of {', '.join(known)}; rename it"
    if bounds is None:
        yield f"{field} needs reward.from_score, the range of rewards; set it, or remove the scale"
        return
    for first, second in (("mean", "std"), ("low", "high")):
        if (getattr(scale, first) is None) != (getattr(scale, second) is None):
            yield f"{field} must have {first} and {second} together; set both, or neither"
    if scale.mean is not None and scale.low is not None:
        yield f"{field} must have mean and std, or low and high; remove a pair"
    if scale.low is not None and scale.high is not None and scale.low >= scale.high:
        yield f"{field}.low={scale.low:g} must be below {field}.high={scale.high:g}; change one"
    for which in ("correct", "incorrect", "truncated_correct"):
        value = getattr(scale, which)
        if value is not None and not bounds[0] <= value <= bounds[1]:
            yield (
                f"{field}.{which}={value:g} must lie in reward.from_score=[{bounds[0]:g}, "
                f"{bounds[1]:g}], the range of rewards; change one of them"
            )
