"""What is asked of the sampler: settings, seeds, limits, and which replica samples which positions.

Pure: imports neither torch nor vllm.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import typing
from collections.abc import Sequence
from typing import Literal

from vapo_megatron.errors import ConfigError

if typing.TYPE_CHECKING:
    from vapo_megatron.config import RolloutConfig
    from vapo_megatron.data.batch import Prompt
    from vapo_megatron.models.hf_config import ModelShape

SeedRole = Literal["train", "evaluation"]

SMALLEST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this without telling its caller."""

TOKENS_BETWEEN_QUESTIONS = 64
"""Tokens of a response between two questions whether there is time for more of them."""


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
    """Keeps evaluation's random numbers apart from training's."""
    whole_groups: bool = False
    """One replica samples all responses to a prompt, even where others have less to do then."""
    round: int = 0
    """Counts the calls of one step, and keeps their random numbers apart."""

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
    """Return the seed of one response's random numbers.

    It depends on what is asked, never on where or when it is sampled: neither on the number of
    replicas, nor on the batch that the response shares, nor on the process or the Python version.

    Args:
        seed: the run's seed.
        step: step of the run.
        role: "train" or "evaluation".
        prompt_index: `Prompt.index`, the row in the data set.
        sample: counts the responses to this prompt in this round.
        round: counts the rounds of sampling in this step.

    Returns:
        An integer in [0, 2**63), which torch.Generator.manual_seed takes.
    """
    key = f"{seed}/{step}/{role}/{prompt_index}/{sample}" + (f"/{round}" if round else "")
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def request_seeds(
    prompts: Sequence[Prompt],
    group_size: int,
    *,
    seed: int,
    step: int,
    role: SeedRole,
    round: int = 0,
) -> list[int]:
    """Return one seed per position of a round's repeated prompt list.

    A problem that a round draws more than once continues its sample count, and every round has
    seeds of its own: its groups would be copies of each other otherwise.

    Args:
        prompts: group i occupies [i*group_size, (i+1)*group_size).
        group_size: G.
        seed: the run's seed.
        step: step of the run.
        role: "train" or "evaluation".
        round: counts the rounds of sampling in this step.
    """
    assert len(prompts) % group_size == 0, f"{len(prompts)} prompts are no groups of {group_size}"
    drawn: collections.Counter[int] = collections.Counter()
    seeds = []
    for start in range(0, len(prompts), group_size):
        indices = {p.index for p in prompts[start : start + group_size]}
        assert len(indices) == 1, f"positions {start}.. hold different prompts {sorted(indices)}"
        index = indices.pop()
        first = drawn[index]
        drawn[index] += group_size
        samples = range(first, first + group_size)
        seeds += [request_seed(seed, step, role, index, sample, round) for sample in samples]
    return seeds


def assign(num_requests: int, num_replicas: int, unit: int = 1) -> list[range]:
    """Return the positions that each replica samples.

    They are consecutive, so that a group shares its prompt's KV cache. The sizes differ by at most
    `unit`, the number of requests that stay together, the first replicas taking the larger shares.
    """
    assert num_replicas >= 1, f"num_replicas={num_replicas} must be at least 1"
    assert num_requests % unit == 0, f"{num_requests} requests are no units of {unit}"
    share, extra = divmod(num_requests // unit, num_replicas)
    starts = [(i * share + min(i, extra)) * unit for i in range(num_replicas + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:])]


def max_model_len(shape: ModelShape, rollout: RolloutConfig) -> int:
    """Return the longest prompt and response together.

    Raises:
        ConfigError: the model's positions do not reach that far.
    """
    length = rollout.max_prompt_tokens + rollout.max_response_tokens
    longest = shape.max_position_embeddings
    scaling = shape.rope_scaling
    if scaling and scaling["rope_type"] in ("linear", "yarn"):
        reached = int(scaling["factor"] * scaling["original_max_position_embeddings"])
        longest = max(longest, reached)
    if length > longest:
        raise ConfigError(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} + rollout.max_response_tokens="
            f"{rollout.max_response_tokens} = {length} exceeds the model's max_position_embeddings="
            f"{longest}; lower one of them"
        )
    return length
