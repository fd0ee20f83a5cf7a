"""Arms with adapters (LoRA), of --form lora and keys_lora: ranks, roles, and factors of the rates.

Does a critic with adapters learn values? Every arm pretrains a critic of its own, from the policy's
weights, for as many steps as the seed's value checkpoint has: that is one of whole weights.
"""

from __future__ import annotations

import itertools

from runner.arms import Arm

RANKS, FACTORS = (1, 8, 32), (1, 3, 10)
ROLES = {"both": ("actor", "critic"), "actor": ("actor",), "critic": ("critic",)}
OWN_CRITIC = (
    "model.critic_checkpoint=null", "model.critic_hf_path=null",
    "algorithm.value_pretraining_steps=6",
)  # fmt: skip


def arms(actor_rate: float, critic_rate: float, factor: int) -> tuple[dict[str, Arm], ...]:
    """Return the table's arms, with one factor of the rates, and those with the others.

    Args:
        actor_rate, critic_rate: learning rates of the form's settings, of whole weights.
        factor: by which a role with adapters multiplies its own.
    """
    found: dict[int, dict[str, Arm]] = {one: {} for one in FACTORS}
    for rank, (who, roles), times in itertools.product(RANKS, ROLES.items(), FACTORS):
        rates = {"actor": actor_rate, "critic": critic_rate}
        changes = [f"optimizer.{r}_learning_rate={rates[r] * times:g}" for r in roles]
        names = ",".join(roles)
        changes += [f"model.lora.rank={rank}", f"model.lora.roles=[{names}]"]
        title = f"rank {rank}, {' and '.join(roles)}, {times} x the rate"
        found[times][f"rank{rank}_{who}_x{times}"] = Arm(title, "", (*OWN_CRITIC, *changes))
    chosen = {"vapo": Arm("all weights", "", OWN_CRITIC), **found.pop(factor)}
    return chosen, {name: arm for others in found.values() for name, arm in others.items()}
