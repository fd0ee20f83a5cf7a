"""What the engine is asked for: settings, requests with seeds, limits, and each replica's share.

Imports neither torch nor vllm.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import typing
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from vapo_megatron.data.rollout import Rollout
from vapo_megatron.errors import ConfigError

if typing.TYPE_CHECKING:
    from vapo_megatron.config import RolloutConfig
    from vapo_megatron.data.rollout import Prompt
    from vapo_megatron.models.hf_config import ModelShape

SeedRole = Literal["train", "evaluation"]

SMALLEST_TEMPERATURE = 0.01
"""vLLM silently raises lower temperatures to this."""

TOKENS_BETWEEN_QUESTIONS = 64
"""Decoding steps between two checks whether there is time for more."""

TOKENS_BETWEEN_TURNS = 4
"""Decoding steps between two looks at what responses are waiting for, where ranks must agree."""


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """How the responses of one call are sampled."""

    temperature: float
    """0 takes the most likely token; its log-probabilities are those at temperature 1."""
    top_p: float
    top_k: int
    """-1: off."""
    max_response_tokens: int
    seed_role: SeedRole
    """Separates the random numbers of evaluation and training."""
    whole_groups: bool = False
    """One replica samples all responses to a prompt, at the cost of a less even split."""
    round: int = 0
    """Number of the call within a step; each round has its own random numbers."""
    shared: bool = False
    """Replicas take groups from one list as they become free; False: each has an equal share."""

    def __post_init__(self) -> None:
        if self.temperature != 0 and not self.temperature >= SMALLEST_TEMPERATURE:
            raise ConfigError(
                f"sampling temperature {self.temperature} must be 0 (greedy) or at least "
                f"{SMALLEST_TEMPERATURE}; set rollout.temperature or evaluation.temperature"
            )
        if self.top_k != -1 and self.top_k < 1:
            raise ConfigError(
                f"sampling top_k {self.top_k} must be -1 (off) or at least 1; set evaluation.top_k"
            )


def request_seed(
    seed: int, step: int, role: SeedRole, prompt_index: int, sample: int, round: int = 0
) -> int:
    """Return the seed of one response's random numbers, in [0, 2**63) as torch takes it.

    It depends only on the request, never on where or when it is sampled: not on the number of
    replicas, the other requests of the batch, the process or the Python version.

    Args:
        seed: the run's seed.
        step: step of the run.
        role: "train" or "evaluation".
        prompt_index: `Prompt.index`.
        sample: number of the response to this prompt in this round.
        round: number of the sampling round in this step.
    """
    key = f"{seed}/{step}/{role}/{prompt_index}/{sample}" + (f"/{round}" if round else "")
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def continued_seed(seed: int, num_tokens: int) -> int:
    """Return the seed for resuming an interrupted response after some tokens; its own at 0."""
    if num_tokens == 0:
        return seed
    key = f"{seed}/{num_tokens}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


class Request(NamedTuple):
    """One response that the engine is asked for."""

    rollout: Rollout
    """What there is of it: no tokens at first."""
    seed: int
    """Of its first token."""
    max_tokens: int | None = None
    """To sample now; None: as many as the response may still have."""
    banned: tuple[int, ...] = ()
    """Tokens that none of those is."""


class Waiting(NamedTuple):
    """Responses that have ended for now, and go on once something has been inserted after them.

    Everything is the same on all ranks of a replica.
    """

    number: Callable[[], int]
    """How many there are."""
    back: Callable[[bool], Sequence[Request]]
    """Called every few decoding steps while there are some, and with True while nothing is being
    sampled: it may then take a moment. Returns those that go on now."""


class Work(NamedTuple):
    """What one replica samples in one call; all its ranks are given the same."""

    take: Callable[[int], Sequence[Request]]
    """Called with how many responses there is room for, at the start and whenever some have ended.
    Returns requests to begin now; it may return more, which wait. Nothing: there will be no more.
    """
    ended: Callable[[Rollout], None]
    """Called on every rank with each finished response, not with those that vLLM aborted."""
    expected: int
    """Number of responses, to show."""
    is_enough: Callable[[], bool] = lambda: False
    """Asked after every token; the same on all ranks. True interrupts all that is unfinished."""
    waiting: Waiting | None = None
    """None: a response that has ended is finished."""


def start_groups(
    prompts: Sequence[Prompt],
    sizes: Sequence[int],
    *,
    seed: int,
    step: int,
    role: SeedRole,
    round: int = 0,
    policy_version: int = 0,
) -> list[list[Request]]:
    """Return the requests of each group, none of which has tokens, at positions 0, 1, ...

    A problem that is drawn twice in a round continues its sample numbers in the seeds, and every
    round has its own seeds; otherwise the groups would be copies of each other.

    Args:
        prompts: one for each response; those of a group are adjacent and the same.
        sizes: responses of each group.
        seed, step, role, round: see request_seed.
        policy_version: of the weights that will sample.
    """
    assert sum(sizes) == len(prompts), f"{len(prompts)} prompts are not groups of {list(sizes)}"
    drawn: collections.Counter[int] = collections.Counter()
    groups, start = list[list[Request]](), 0
    for size in sizes:
        indices = {p.index for p in prompts[start : start + size]}
        assert len(indices) == 1, f"positions {start}.. have different prompts {sorted(indices)}"
        index = indices.pop()
        groups.append(
            [
                Request(
                    Rollout.empty(prompts[start + i], i, start + i, policy_version),
                    request_seed(seed, step, role, index, drawn[index] + i, round),
                )
                for i in range(size)
            ]
        )
        drawn[index] += size
        start += size
    return groups


def assign(num_items: int, num_replicas: int) -> list[range]:
    """Return the items, such as positions or groups, that each replica samples.

    They are consecutive, so that a group shares its prompt's KV cache. Shares differ by at most
    one; the first replicas get the larger ones.
    """
    assert num_replicas >= 1, f"num_replicas={num_replicas} must be at least 1"
    share, extra = divmod(num_items, num_replicas)
    starts = [i * share + min(i, extra) for i in range(num_replicas + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:])]


def max_model_len(shape: ModelShape, rollout: RolloutConfig) -> int:
    """Return the largest length of prompt plus response, in tokens.

    Raises:
        ConfigError: it exceeds the model's positions.
    """
    length = rollout.max_prompt_tokens + rollout.max_response_tokens
    longest = _longest_sequence(shape)
    if length > longest:
        scaling, more = shape.rope_scaling or {}, ""
        if scaling.get("rope_type") == "yarn":
            reached = int(scaling["factor"] * scaling["original_max_position_embeddings"])
            more = f", or set it in config.json to what its yarn reaches, {reached}"
        raise ConfigError(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} + rollout.max_response_tokens="
            f"{rollout.max_response_tokens} = {length} exceeds the model's max_position_embeddings="
            f"{longest}; lower one of them{more}"
        )
    return length


def with_own_limits(
    rollout: RolloutConfig, shape: ModelShape, longest_prompt: int
) -> RolloutConfig:
    """Let limits that nobody has set be those of the data and the model.

    Prompts may be as long as the data's longest, responses as the model's positions then allow, but
    no longer than the default.
    """
    given, limits = rollout.model_fields_set, dict[str, int]()
    if "max_prompt_tokens" not in given:
        limits["max_prompt_tokens"] = longest_prompt
    if "max_response_tokens" not in given:
        room = _longest_sequence(shape) - limits.get("max_prompt_tokens", rollout.max_prompt_tokens)
        limits["max_response_tokens"] = max(1, min(rollout.max_response_tokens, room))
    return rollout.model_copy(update=limits)


def _longest_sequence(shape: ModelShape) -> int:
    """Return the model's positions, in tokens, as vLLM counts them."""
    longest, scaling = shape.max_position_embeddings, shape.rope_scaling
    # Other scalings leave max_position_embeddings as it is after scaling.
    if scaling and scaling["rope_type"] == "linear":
        longest = int(longest * scaling["factor"])
    return longest
