"""GAE counted in turns: one step of an episode is what the policy says between two observations."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vapo_megatron.algorithm.gae import decoupled_gae


class TurnLayout(NamedTuple):
    """Which tokens are of which turn."""

    number: Tensor
    """int64 [T]: the turn of each token, counted over all responses."""
    first: Tensor
    """int64 [K]: the first token of each turn."""
    cu_turns: Tensor
    """int64 [B+1]: boundaries of the responses in K."""


def turn_layout(turn_starts: Tensor | None, cu_seqlens: Tensor) -> TurnLayout:
    """Return which tokens are of which turn.

    Args:
        turn_starts: [T] bool, or numbers that are not 0, where a token begins a turn; the first
            token of a response does in any case. None: each response is one turn.
        cu_seqlens: integer [B+1] from 0 to T, boundaries of the responses; they may be empty.
    """
    bounds = cu_seqlens.long()
    num_tokens = int(bounds[-1])
    starts = torch.zeros(num_tokens, dtype=torch.bool, device=bounds.device)
    if turn_starts is not None:
        starts |= turn_starts != 0
    starts[bounds[:-1][bounds.diff() > 0]] = True
    counted = torch.cat([bounds.new_zeros(1), starts.cumsum(0)])
    return TurnLayout(counted[1:] - 1, starts.nonzero().flatten(), counted[bounds])


def turn_gae(
    token_rewards: Tensor, values: Tensor, layout: TurnLayout, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns of turns, and give them to all tokens of their turn.

        R_k     = sum of the rewards of turn k's tokens
        delta_k = R_k + gamma * V_{k+1} - V_k        V_k at the turn's first token
        A_k, return_k: decoupled_gae's over turns

    A turn of many tokens then passes its advantage on with lambda once, not once for each token.

    Source: StepPO (arXiv 2604.18401) has one step of PPO for each turn; decoupled lambdas are
    VC-PPO's (arXiv 2503.01491).

    Args:
        token_rewards: [T] float32 or float64.
        values: [T], V of the state before each token; only those of first tokens are used.
        layout: from turn_layout.
        settings: lambda_actor, lambda_critic and gamma of decoupled_gae, counted in turns.

    Returns:
        (advantages [T], returns [T]), as decoupled_gae has them.
    """
    rewards = token_rewards.new_zeros(layout.first.numel()).double()
    rewards.index_add_(0, layout.number, token_rewards.double())
    of_turns = decoupled_gae(
        rewards.to(token_rewards.dtype), values[layout.first], layout.cu_turns, **settings
    )
    advantages, returns = (each[layout.number] for each in of_turns)
    return advantages, returns
