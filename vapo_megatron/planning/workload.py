"""A step's workload: how many responses, how long, and how they are packed.

Response lengths are not known beforehand and assumed to be log-normal with a given spread and mean,
clipped at the longest response allowed. The sample consists of the distribution's quantiles in a
seeded order, so it is the same on every machine. All prompts have the mean length, and all episodes
of an environment the mean number of turns and of observation tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vapo_megatron.config import VapoConfig
from vapo_megatron.data.order import seeded_permutation
from vapo_megatron.data.packing import attention_tokens, plan_step
from vapo_megatron.errors import ConfigError

SPREAD = 0.5
"""Default of Workload.spread: an assumption."""

TYPICAL_PROMPT_TOKENS = 256
"""Default mean prompt: an assumption."""

TYPICAL_TURNS = 4
"""Default mean turns of an episode: an assumption."""

TYPICAL_OBSERVATION_TOKENS = 256
"""Default mean observation: an assumption."""

PACKED_MINI_BATCHES = 4
"""Mini-batches that are packed; a step's others repeat them."""

_PURPOSE = 7
"""Makes this order differ from other orders of the same seed."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A step's responses, and the roles that are trained on them."""

    num_responses: int
    group_size: int
    mini_batch_size: int
    prompt_tokens: int
    """Mean length of a prompt."""
    mean_response_tokens: float
    """Sampled ones."""
    max_response_tokens: int
    """Of what is sampled and observed together."""
    trained_roles: tuple[Literal["actor", "critic"], ...] = ("actor", "critic")
    critic_updates_per_step: int = 1
    spread: float = SPREAD
    """Standard deviation of the logarithm of the response lengths, before clipping."""
    turns: float = 1.0
    """Mean actions of an episode; 1: there is no environment."""
    observation_tokens: int = 0
    """Mean tokens of all of an episode's observations, which the model sees and does not sample."""

    @property
    def given_tokens(self) -> int:
        """Tokens of a sequence that are not sampled: prompt and observations."""
        return self.prompt_tokens + self.observation_tokens

    @property
    def response_tokens(self) -> int:
        """Response tokens of a step: sampled ones."""
        return int(response_lengths(self).sum())

    @property
    def total_tokens(self) -> int:
        """Tokens of a step's sequences, a prompt counted once per response."""
        return self.response_tokens + self.num_responses * self.given_tokens


def workload_of(
    config: VapoConfig,
    *,
    mean_response_tokens: float | None = None,
    prompt_tokens: int | None = None,
    spread: float = SPREAD,
    turns: float | None = None,
    observation_tokens: int | None = None,
) -> Workload:
    """Return a configuration's workload.

    Args:
        config: algorithm, rollout and environment are used.
        mean_response_tokens: sampled; None: half of what observations leave of
            rollout.max_response_tokens.
        prompt_tokens: mean; None: 256, or rollout.max_prompt_tokens if that is less.
        spread: see Workload.
        turns: mean of an episode; None: 4, or environment.max_turns if that is less; 1 without an
            environment.
        observation_tokens: mean of an episode; None: 256 for each turn but the last, up to half of
            rollout.max_response_tokens, or what the response leaves of it.

    Raises:
        ConfigError: a mean exceeds its maximum, or these say that there are episodes and others
            that there are none.
    """
    rollout, algorithm = config.rollout, config.algorithm
    turns, observed = _episodes(config, turns, observation_tokens, mean_response_tokens)
    longest = rollout.max_response_tokens - observed
    mean = longest / 2 if mean_response_tokens is None else mean_response_tokens
    prompt = prompt_tokens
    if prompt is None:
        prompt = min(TYPICAL_PROMPT_TOKENS, rollout.max_prompt_tokens)
    for name, value, limit in (
        ("response", mean, longest),
        ("prompt", prompt, rollout.max_prompt_tokens),
    ):
        if not 1 <= value <= limit:
            less = f" less {observed} of observations" if observed and name == "response" else ""
            field = f"rollout.max_{name}_tokens={getattr(rollout, f'max_{name}_tokens')}"
            raise ConfigError(
                f"a mean {name} of {value:g} tokens must lie between 1 and {field}{less}; change "
                "one of them"
            )
    return Workload(
        num_responses=algorithm.responses_per_step,
        group_size=algorithm.group_size,
        mini_batch_size=algorithm.mini_batch_size,
        prompt_tokens=prompt,
        mean_response_tokens=mean,
        max_response_tokens=rollout.max_response_tokens,
        trained_roles=algorithm.trained_roles,
        critic_updates_per_step=algorithm.critic_updates_per_step,
        spread=spread,
        turns=turns,
        observation_tokens=observed,
    )


def _episodes(
    config: VapoConfig, turns: float | None, observed: int | None, mean_response: float | None
) -> tuple[float, int]:
    """Return the mean turns and observation tokens of an episode. Raises ConfigError."""
    environment, rollout = config.environment, config.rollout
    most = environment.max_turns if environment.is_on else math.inf
    if turns is None:
        is_on = environment.is_on or observed
        turns = float(min(TYPICAL_TURNS, most) if is_on else 1)
    if not 1 <= turns <= most:
        raise ConfigError(
            f"a mean of {turns:g} turns must lie between 1 and environment.max_turns={most:g}; "
            "change one of them"
        )
    if observed is None:
        longest = rollout.max_response_tokens
        room = longest / 2 if mean_response is None else longest - mean_response
        observed = int(max(0, min(TYPICAL_OBSERVATION_TOKENS * (turns - 1), room)))
    if observed and turns == 1:
        raise ConfigError(
            f"{observed} tokens of observations need more than one turn; set the mean number of "
            "turns, or none of these tokens"
        )
    if turns > 1 and rollout.carry_over_groups:
        raise ConfigError(
            f"rollout.carry_over_groups={rollout.carry_over_groups} must be 0 with episodes of "
            "several turns; change one of them"
        )
    return turns, observed


def response_lengths(workload: Workload) -> NDArray[np.int64]:
    """Return int64 [responses]: lengths with the workload's mean (to a token) and maximum."""
    return _sample(workload, workload.num_responses)


@functools.lru_cache(maxsize=16)
def _sample(workload: Workload, count: int) -> NDArray[np.int64]:
    """Return `count` lengths that cover the whole distribution, however small the count."""
    longest = workload.max_response_tokens - workload.observation_tokens
    normal = statistics.NormalDist(0, workload.spread)
    spread = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])

    def lengths(middle: float) -> NDArray[np.int64]:
        return np.clip(np.rint(np.exp(middle + spread)), 1, longest).astype(np.int64)

    low, high = -10.0, float(np.log(longest)) + 10.0
    for _ in range(60):
        middle = (low + high) / 2
        if lengths(middle).mean() < workload.mean_response_tokens:
            low = middle
        else:
            high = middle
    return lengths(high)[seeded_permutation(count, 0, _PURPOSE)]


class Loads(NamedTuple):
    """What each data-parallel rank processes per mini-batch; float64 [mini-batches, ranks]."""

    tokens: NDArray[np.float64]
    pairs: NDArray[np.float64]
    """Pairs of a query and a key at or before it in the same sequence."""
    outputs: NDArray[np.float64]
    """Response tokens."""
    microbatches: NDArray[np.float64]
    """Their number, the same on all ranks of a mini-batch."""


@functools.lru_cache(maxsize=256)
def loads(workload: Workload, hidden_size: int, dp_size: int, max_tokens: int) -> Loads:
    """Pack the workload as the trainer does (data/packing.py) and sum up each rank's share.

    Args:
        workload: of a step.
        hidden_size: of the model, which decides the cost of attention relative to the matrices.
        dp_size: number of data-parallel ranks.
        max_tokens: parallel.max_tokens_per_microbatch.
    """
    size = workload.mini_batch_size
    count = workload.num_responses // size
    packed = min(count, PACKED_MINI_BATCHES)
    responses = _sample(workload, packed * size)
    lengths = responses + workload.given_tokens
    plan = plan_step(
        lengths.tolist(),
        mini_batch_size=size,
        dp_size=dp_size,
        max_tokens_per_microbatch=max_tokens,
        seed=0,
        attention_tokens=attention_tokens(hidden_size),
    )
    found = np.zeros((4, packed, dp_size))
    for index, mini_batch in enumerate(plan.mini_batches):
        found[3, index] = mini_batch.num_microbatches
        for rank, microbatches in enumerate(mini_batch.ranks):
            mine = [position for microbatch in microbatches for position in microbatch]
            of_rank = lengths[mine]
            found[:3, index, rank] = (
                of_rank.sum(),
                (of_rank * (of_rank + 1) // 2).sum(),
                responses[mine].sum(),
            )
    return Loads(*found[:, np.arange(count) % packed])
