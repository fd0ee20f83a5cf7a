"""A few scored responses, their dump, and the configuration of a tiny run that fits them."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vapo_megatron.config import VapoConfig
from vapo_megatron.data.rollout import STATUSES, Prompt, Rollout, ScoredRollout
from vapo_megatron.rollout.dump import held_steps, write_step

MODEL = dict(num_layers=2, hidden=32, heads=2, kv_heads=2, ffn=48, vocab=60)
GROUP_SIZE, NUM_RESPONSES = 4, 16
VERIFIERS, SOURCES = ("math", "code", "math"), ("sums", "sums", "programs")
"""By Prompt.index; the first verifier is the run's, which a row need not name."""
TEXTS = ("", "seven", "sieben \u00fc", "\u4e03", "half a pair: \udc80")


def rollouts(step: int = 1) -> list[ScoredRollout]:
    """Seeded responses to groups of one prompt each, two of which are the same prompt."""
    draw = random.Random(step)
    scored = []
    for position in range(NUM_RESPONSES):
        group = position // GROUP_SIZE
        index = 0 if group == 3 else group
        prompt = Prompt(
            index, f"{index}? {TEXTS[index]}", (index, 5, 7)[: 2 + index % 2], "7 ",
            {} if index == 0 else {"verifier": VERIFIERS[index]}, SOURCES[index],
        )  # fmt: skip
        length = draw.randint(1, 12)
        scored.append(
            ScoredRollout(
                Rollout(
                    prompt=prompt,
                    sample=position % GROUP_SIZE,
                    position=position,
                    token_ids=array("i", [draw.randrange(60) for _ in range(length)]),
                    # A multiple of 2^-10 is the same in float32.
                    logprobs=array("f", [-draw.randint(1, 9000) / 1024 for _ in range(length)]),
                    truncated=length > 10,
                    policy_version=step - 1,
                ),
                text=draw.choice(TEXTS),
                status=STATUSES[position % len(STATUSES)],
                reward=0.1 * draw.randint(-9, 9),
            )
        )
    return scored


def write(root: Path, scored: list[ScoredRollout], step: int = 1, keep_last: int = 99) -> None:
    """Write a step of NUM_RESPONSES in groups of GROUP_SIZE; a worker's function."""
    sizes = {"num_responses": NUM_RESPONSES, "group_size": GROUP_SIZE}
    write_step(root, step, scored, **sizes, keep_last=keep_last)


def dump(root: Path, steps: list[int], num_ranks: int, keep_last: int = 9) -> list[int]:
    """Write steps; every rank of the first num_ranks has consecutive responses; a worker's."""
    for step in steps:
        size, rank = NUM_RESPONSES // num_ranks, dist.get_rank()
        write(root, rollouts(step)[rank * size : (rank + 1) * size], step, keep_last)
    return held_steps(root)


def config(hf: Path, **sections: dict[str, Any]) -> VapoConfig:
    tree: dict[str, Any] = {
        "model": {"hf_path": str(hf), "dtype": "float32", "value_head_init_std": 0.2},
        "algorithm": {
            "responses_per_step": NUM_RESPONSES,
            "group_size": GROUP_SIZE,
            "mini_batch_size": 8,
            "value_pretraining_steps": 0,
            "policy_steps": 2,
        },
        "rollout": {"max_prompt_tokens": 4, "max_response_tokens": 12},
    }
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    return VapoConfig.model_validate(tree)
