"""Sizes of what tools/gpu_smoke.py measures: in full for one GPU, and small for a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.models.known import known_shape
from vapo_megatron.weights.table import parameter_count

STATE_BYTES = 22
"""Of each parameter while Adam steps in bfloat16: 2, main copy 4, gradient 4, moments 8, and 4
that torch's Adam needs for the root of the second moment."""

STATE_SHARE = 0.7
"""Of a GPU's memory that these bytes may take; activations and scores need the rest."""


class AttentionCase(NamedTuple):
    """A packed batch of one layer."""

    heads: int
    groups: int
    head_dim: int
    lengths: tuple[int, ...]


class Load(NamedTuple):
    """What a model is timed with: responses of different lengths, packed as the trainer does."""

    num_responses: int
    prompt_tokens: int
    longest_response: int
    """Lengths are spread evenly up to here."""
    tokens_per_microbatch: int
    num_updates: int
    """Timed, after one that is not."""

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, response) tokens of each response."""
        step = self.longest_response / self.num_responses
        return [(self.prompt_tokens, round(step * (i + 1))) for i in range(self.num_responses)]


class EngineLoad(NamedTuple):
    """What vLLM is asked for: responses that no token ends."""

    shape: ModelShape
    num_responses: int
    prompt_tokens: int
    """Prompts have 1 to this many."""
    response_tokens: int
    kv_cache_bytes: int


class StepLoad(NamedTuple):
    """A whole step, by turns on one GPU."""

    shape: ModelShape
    overrides: tuple[str, ...]
    """section.field=value of its configuration."""
    num_stop_tokens: int
    """Any of so many tokens, drawn by chance, ends a response."""
    num_steps: int


class Sizes(NamedTuple):
    """Of one run of the tool."""

    parity_shape: ModelShape
    parity_lengths: tuple[tuple[int, int], ...]
    """(prompt, response) tokens."""
    attention: tuple[AttentionCase, ...]
    attention_timed: AttentionCase
    logprobs: tuple[int, int, int]
    """Tokens, vocabulary, hidden size."""
    load: Load
    sampler: EngineLoad
    step: StepLoad
    all_reduce_elements: int
    shrink: dict[str, Any]
    """Fields of ModelShape that replace those of a published model."""

    def trained_shape(self, name: str, memory_bytes: int | None) -> tuple[ModelShape, str]:
        """Return a published model with as many layers as fit, and how to call it.

        Args:
            name: one of models.known.KNOWN_MODELS.
            memory_bytes: of the GPU; None: no limit.
        """
        shape = dataclasses.replace(known_shape(name), **self.shrink)
        layers = shape.num_layers
        if memory_bytes is not None:
            empty = parameter_count(dataclasses.replace(shape, num_layers=0))
            per_layer = (parameter_count(shape) - empty) // layers
            fitting = (int(STATE_SHARE * memory_bytes / STATE_BYTES) - empty) // per_layer
            layers = max(1, min(layers, fitting))
        title = f"{name} shape" + (", shrunk" if self.shrink else "")
        if layers < shape.num_layers:
            title += f", {layers} of {shape.num_layers} layers"
        return dataclasses.replace(shape, num_layers=layers), title


_MIXED = (1, 2, 127, 128, 129, 700, 64, 1500)
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_layers": 2}

FULL = Sizes(
    # Widths of a real model; a short vocabulary, as the log-probabilities have a section of their
    # own, and few layers, as rounding adds up over them.
    parity_shape=dataclasses.replace(known_shape("Qwen2.5-0.5B"), num_layers=4, vocab_size=8000),
    parity_lengths=((17, 40), (5, 1), (64, 130), (33, 97), (100, 28), (2, 300)),
    attention=(
        AttentionCase(heads=14, groups=2, head_dim=64, lengths=_MIXED),
        AttentionCase(heads=28, groups=4, head_dim=128, lengths=_MIXED),
    ),
    attention_timed=AttentionCase(heads=28, groups=4, head_dim=128, lengths=(4096,) * 8),
    logprobs=(8192, 152064, 3584),
    load=Load(
        num_responses=24, prompt_tokens=256, longest_response=4096,
        tokens_per_microbatch=8192, num_updates=2,
    ),
    sampler=EngineLoad(
        known_shape("Qwen2.5-0.5B"), num_responses=64, prompt_tokens=200, response_tokens=256,
        kv_cache_bytes=4 << 30,
    ),
    step=StepLoad(
        known_shape("Qwen2.5-0.5B"),
        overrides=(
            "algorithm.responses_per_step=64", "algorithm.group_size=8",
            "algorithm.mini_batch_size=32", "parallel.max_tokens_per_microbatch=8192",
            "rollout.max_prompt_tokens=64", "rollout.max_response_tokens=1024",
            "rollout.gpu_memory_utilization=0.3", "rollout.max_num_sequences=64",
        ),
        num_stop_tokens=300, num_steps=2,
    ),
    all_reduce_elements=1 << 27,
    shrink={},
)  # fmt: skip

# As small as vLLM's Qwen2 allows on a CPU: hidden size / heads is 32.
_SMALL_SHAPE = dataclasses.replace(
    known_shape("Qwen2.5-0.5B"), hidden_size=128, ffn_hidden_size=256, vocab_size=500, **_HEADS
)

SMALL = Sizes(
    parity_shape=_SMALL_SHAPE,
    parity_lengths=((5, 9), (3, 1), (8, 20), (2, 30)),
    attention=(AttentionCase(heads=4, groups=2, head_dim=32, lengths=(1, 2, 31, 32, 33, 90)),),
    attention_timed=AttentionCase(heads=4, groups=2, head_dim=32, lengths=(128,) * 2),
    logprobs=(64, 2000, 64),
    load=Load(
        num_responses=6, prompt_tokens=8, longest_response=48,
        tokens_per_microbatch=96, num_updates=1,
    ),
    sampler=EngineLoad(
        _SMALL_SHAPE, num_responses=16, prompt_tokens=40, response_tokens=24,
        kv_cache_bytes=32 << 20,
    ),
    step=StepLoad(
        _SMALL_SHAPE,
        overrides=(
            "algorithm.responses_per_step=8", "algorithm.group_size=4",
            "algorithm.mini_batch_size=4", "parallel.max_tokens_per_microbatch=256",
            "rollout.max_prompt_tokens=16", "rollout.max_response_tokens=48",
            "rollout.kv_cache_bytes=33554432", "rollout.max_num_sequences=8",
        ),
        num_stop_tokens=20, num_steps=1,
    ),
    all_reduce_elements=1 << 12,
    shrink={"hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 1000, **_HEADS},
)  # fmt: skip
