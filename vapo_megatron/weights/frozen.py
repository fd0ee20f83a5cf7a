"""Which parameters of a role that learns are left out of its training.

Imports no torch, so that planning counts from it.
"""

from __future__ import annotations

from typing import NamedTuple

from vapo_megatron.config import AlgorithmConfig, ModelConfig
from vapo_megatron.weights.table import Row


class Frozen(NamedTuple):
    """Parts of a model that keep their weights."""

    attention: bool
    """algorithm.freeze_critic_attention, of a critic. Source: SAO (arXiv 2607.07508)."""
    routers: bool
    """model.freeze_router."""

    def __contains__(self, row: object) -> bool:
        """Is a row of the name table among them?"""
        assert isinstance(row, Row)
        return (self.attention and row.is_attention) or (self.routers and row.is_router)


def frozen(algorithm: AlgorithmConfig, model: ModelConfig, role: str) -> Frozen:
    """Return what a role does not train."""
    attention = role == "critic" and algorithm.freeze_critic_attention
    return Frozen(attention, model.freeze_router)
