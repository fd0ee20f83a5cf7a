"""Accuracy on held-out problems, sampled and scored by the same code as training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vapo_megatron.algorithm.group_sampling import repeat_for_group
from vapo_megatron.batch import Prompt
from vapo_megatron.config import VapoConfig
from vapo_megatron.parallel.reduce import sum_over_world
from vapo_megatron.reward.scoring import score_rollouts
from vapo_megatron.rollout.requests import SamplingSettings


def evaluate(
    engine: Any,
    verifier: Any,
    config: VapoConfig,
    problems: Sequence[Prompt],
    *,
    policy_version: int,
    on_progress: Any = None,
) -> dict[str, float]:
    """Sample `evaluation.samples` responses per problem and average their correctness (avg@K).

    The seeds do not depend on the training step: every evaluation of a run draws the same noise, so
    that differences come from the weights.

    Returns:
        evaluation/avg@K and evaluation/response_length_mean, over all problems and samples, on
        every rank.
    """
    samples = config.evaluation.samples
    sampling = SamplingSettings(
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p,
        top_k=config.evaluation.top_k,
        max_response_tokens=config.rollout.max_response_tokens,
        seed_role="evaluation",
    )
    rollouts = engine.generate(
        repeat_for_group(list(problems), samples),
        samples,
        0,
        sampling,
        policy_version,
        on_progress=on_progress,
    )
    scored = score_rollouts(verifier, rollouts, config.reward, sampling.max_response_tokens)
    local = [
        sum(s.is_correct for s in scored),
        sum(len(s.rollout.token_ids) for s in scored),
        len(scored),
    ]
    correct, tokens, count = sum_over_world(torch.tensor(local, dtype=torch.float64)).tolist()
    return {
        f"evaluation/avg@{samples}": correct / count,
        "evaluation/response_length_mean": tokens / count,
    }
