"""Dynamic sampling: train on the prompts whose responses are neither all right nor all wrong."""

from __future__ import annotations

import torch
from torch import Tensor


def group_verdicts(is_correct: Tensor, positions: Tensor, group_size: int) -> Tensor:
    """Lay the verdicts of a step's responses out by group, in whatever order they come.

    Args:
        is_correct: bool [P*G], the verifier's verdict, not the shaped reward.
        positions: int64 [P*G], Rollout.position of each: sample j of prompt i stands at i*G + j.
        group_size: G, at least 1.

    Returns:
        bool [P, G], prompts in the order of their positions.

    Raises:
        ValueError: group_size below 1, or positions that are not 0 .. P*G-1, each once.
    """
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1")
    count = positions.numel()
    if count % group_size or not torch.equal(
        positions.sort().values.long(), torch.arange(count, device=positions.device)
    ):
        raise ValueError(
            f"positions must hold each of 0 .. P*G-1 once, with G = group_size = {group_size}; "
            f"they are {count} positions; pass those of all ranks"
        )
    return is_correct[positions.argsort()].view(-1, group_size)


def select_groups(is_correct: Tensor, num_groups: int) -> tuple[Tensor, int]:
    """Which groups a step trains on, and how many are still to be sampled.

        kept: the first num_groups groups with 0 < correct < G

    In a group whose responses are all right or all wrong every group-relative advantage is 0.
    Groups that are kept beyond num_groups are cut from the end, so that the decision depends on
    the verdicts alone, and not on which rank sampled what or finished first.

    Source: DAPO (arXiv 2503.14476, section 3.2), dynamic sampling.

    Args:
        is_correct: bool [P, G], the verifier's verdicts, prompts in the order of their positions
            (see group_verdicts); several rounds stand one after the other.
        num_groups: groups that a step trains on, at least 1.

    Returns:
        (rows int64 [K], the kept groups, ascending, K <= num_groups; missing = num_groups - K, how
        many more mixed groups the next round must find).

    Raises:
        ValueError: num_groups below 1, verdicts that are not bool [P, G].
    """
    if num_groups < 1:
        raise ValueError(f"num_groups={num_groups} must be at least 1")
    if is_correct.ndim != 2 or is_correct.dtype != torch.bool:
        raise ValueError(
            f"is_correct: shape {tuple(is_correct.shape)}, dtype {is_correct.dtype}; "
            "must be (P, G) bool"
        )
    mixed = is_correct.any(1) & ~is_correct.all(1)
    rows = mixed.nonzero().squeeze(1)[:num_groups]
    return rows, num_groups - rows.numel()
