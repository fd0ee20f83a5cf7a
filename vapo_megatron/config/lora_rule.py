"""The rule of `model.lora`, which involves the optimizer and the critic."""

from __future__ import annotations

from vapo_megatron.config.schema import VapoConfig


def lora_rule(c: VapoConfig) -> str | None:
    """Refuse adapters with what they exclude; see rules.py."""
    lora = c.model.lora
    if c.rollout.adapter_sync == "adapter" and not lora.of("actor"):
        return (
            "rollout.adapter_sync=adapter needs adapters of the actor, found model.lora.rank="
            f"{'null' if lora.rank is None else lora.rank} and roles={lora.roles}; set the rank, "
            "or adapter_sync=merged"
        )
    if lora.rank is None:
        named = {"targets": lora.targets, "path": lora.path}
        for name, value in named.items():
            if value is not None:
                return (
                    f"model.lora.{name}={value} needs model.lora.rank, found null; set the rank, "
                    f"or {name}=null"
                )
        return None
    if not any(lora.of(role) for role in c.algorithm.roles):
        return (
            f"model.lora.roles={lora.roles} has none of this run's models, "
            f"{', '.join(c.algorithm.roles)}, so no adapter would be trained; set it to one of "
            "them, or rank=null"
        )
    for role in lora.roles:
        if (method := c.optimizer.method(role)) != "adamw":
            return (
                f"optimizer.{role}_method={method} must be adamw with model.lora.rank={lora.rank}: "
                f"there are no matrices of the {role} to train; set it, or rank=null"
            )
    if lora.path is not None and not lora.of("actor"):
        return (
            f"model.lora.path={lora.path} is for the actor, which model.lora.roles={lora.roles} "
            "leaves out; set path=null, or add actor"
        )
    if c.algorithm.freeze_critic_attention and lora.of("critic"):
        return (
            f"algorithm.freeze_critic_attention=true must be false with model.lora.rank="
            f"{lora.rank}, which freezes all of the critic's weights; leave its attention without "
            "adapters by model.lora.targets"
        )
    other = c.model.critic_hf_path
    if lora.shares("critic") and other is not None and other != c.model.hf_path:
        return (
            f"model.critic_hf_path={other} must be null with model.lora.share_base=true: the "
            "critic then computes with the actor's frozen weights; set share_base=false, or "
            "critic_hf_path=null"
        )
    return None
