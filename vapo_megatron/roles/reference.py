"""The frozen reference policy: what the actor started from, to tell how far it has gone.

Before: the process groups exist. After: this rank holds the shards of model.hf_path that the actor
has, and nothing else: no optimizer, no gradient buffers, no DDP. No checkpoint holds it, for a run
that resumes reads it from model.hf_path again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vapo_megatron.config import VapoConfig
from vapo_megatron.data.batch import Microbatch
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.schedule import forward_only
from vapo_megatron.roles.actor import policy_logprobs
from vapo_megatron.roles.model import FrozenModel


class Reference:
    """Policy model that never learns."""

    def __init__(self, shape: ModelShape, config: VapoConfig, ranks: Ranks) -> None:
        self.shape, self.config = shape, config
        self.frozen = FrozenModel(shape, config, ranks, "actor", config.model.hf_path)

    def compute_logprobs(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Return logprobs of the response tokens at the rollout's temperature; float32 [T], CPU."""

        def head(output: Tensor, microbatch: Microbatch) -> Tensor:
            logprobs, _ = policy_logprobs(
                self.frozen, output, microbatch, self.shape, self.config, with_entropy=False
            )
            return logprobs

        return torch.cat(forward_only(self.frozen.model, microbatches, head)).cpu()
