"""AdamW, Dion and Muon, their schedule and clipping."""

from __future__ import annotations

from typing import Literal

from vapo_megatron.config.section import Section, field

Method = Literal["adamw", "dion", "muon"]


class OptimizerConfig(Section):
    """AdamW, or Dion or Muon for matrices; linear learning rate warm-up, then constant."""

    actor_method: Method = field(
        "adamw",
        "What updates the linear weights of the actor's layers; embeddings, output layer, norms "
        "and biases are AdamW's in any case.",
    )
    critic_method: Method = field(
        "adamw", "As actor_method, of the critic; its value head is AdamW's."
    )
    matrix_rank_fraction: float = field(
        0.25, "Dion's rank, as a share of a matrix's shorter side.", "rank fraction", gt=0, le=1
    )
    matrix_momentum: float = field(0.95, "Of Dion and Muon.", "mu", ge=0, lt=1)
    matrix_scale: Literal["rms", "spectral"] = field(
        "rms",
        "Size of Dion's and Muon's updates: rms, that of AdamW's; spectral, sqrt(out / in), which "
        "needs other learning rates.",
    )
    matrix_rate_factor: float = field(
        1.0, "Learning rate of Dion and Muon, as a multiple of the role's.", gt=0
    )

    actor_learning_rate: float = field(1e-6, "Peak learning rate of the actor.", gt=0)
    critic_learning_rate: float = field(2e-6, "Peak learning rate of the critic.", gt=0)
    actor_warmup_updates: int = field(
        320, "Warm-up of the actor, in updates of the actor (20 steps of 16).", ge=0
    )
    critic_warmup_updates: int = field(
        320, "Warm-up of the critic, in updates of the critic.", ge=0
    )
    adam_beta1: float = field(0.9, "AdamW's beta1.", "beta_1", ge=0, lt=1)
    adam_beta2: float = field(0.95, "AdamW's beta2.", "beta_2", ge=0, lt=1)
    adam_eps: float = field(1e-8, "AdamW's epsilon.", gt=0)
    weight_decay: float = field(0.1, "Decoupled weight decay; not on biases and norms.", ge=0)
    actor_clip_grad: float = field(1.0, "Gradient norm clipping of the actor; 0: off.", ge=0)
    critic_clip_grad: float = field(1.0, "Gradient norm clipping of the critic; 0: off.", ge=0)
    max_skipped_updates: int = field(
        3,
        "Stop the run after this many consecutive updates of a role were skipped because a loss, "
        "gradient, value or log-probability was not finite.",
        ge=1,
    )

    def method(self, role: str) -> Method:
        """Return what updates the matrices of a role, "actor" or "critic"."""
        return self.actor_method if role == "actor" else self.critic_method
