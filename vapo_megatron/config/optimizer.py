"""AdamW, its schedule and its clipping."""

from __future__ import annotations

from vapo_megatron.config.section import Section, field


class OptimizerConfig(Section):
    """AdamW; linear learning rate warm-up, then constant."""

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
