"""The section `model.lora`: adapters that are trained in place of the weights."""

from __future__ import annotations

from typing import Literal, get_args

from vapo_megatron.config.section import Section, field

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)
ATTENTION: tuple[Target, ...] = TARGETS[:4]
"""All that get an adapter in a layer with experts."""


class LoraConfig(Section):
    """Adapters, W + alpha / rank * B A, whose A and B are trained alone (docs/lora.md)."""

    rank: int | None = field(
        None, "Rows of each A, columns of each B; null: no adapters, all weights are trained.", ge=1
    )
    alpha: float = field(32.0, "The product B A is multiplied by alpha / rank.", gt=0)
    targets: list[Target] | None = field(
        None,
        "Hugging Face's names of the matrices with an adapter; null: all seven, with experts the "
        "attention's four.",
        min_length=1,
    )
    roles: list[Literal["actor", "critic"]] = field(
        ["actor", "critic"],
        "Models with adapters; another one trains all of its weights.",
        min_length=1,
    )
    path: str | None = field(
        None,
        "Initial adapters of the actor, a PEFT directory; null: new ones, whose product is 0.",
    )
    share_base: bool = field(
        True,
        "Actor, critic and reference policy have one copy of the frozen weights; false: each has "
        "its own.",
    )

    @property
    def factor(self) -> float:
        """What B A is multiplied by."""
        assert self.rank is not None, "there are no adapters"
        return self.alpha / self.rank

    def of(self, role: str) -> bool:
        """Whether a role has adapters; a reference policy has the actor's initial ones."""
        if role == "reference":
            return self.rank is not None and self.path is not None
        return self.rank is not None and role in self.roles

    def shares(self, role: str) -> bool:
        """Whether a role computes with the actor's frozen weights."""
        is_frozen = role == "reference" or (role == "critic" and self.of(role))
        return self.share_base and self.of("actor") and is_frozen
