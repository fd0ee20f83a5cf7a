"""Which roles have adapters, and which compute with the actor's frozen weights."""

import pytest

from vapo_megatron.config.lora import LoraConfig

ROLES = ("actor", "critic", "reference", "reward_model")


@pytest.mark.parametrize(
    ("fields", "adapted", "sharing"),
    [
        ({}, (), ()),
        ({"rank": 4}, ("actor", "critic"), ("critic", "reference")),
        ({"rank": 4, "share_base": False}, ("actor", "critic"), ()),
        # The reference policy is the first actor, whose adapters are then not 0.
        ({"rank": 4, "path": "p"}, ("actor", "critic", "reference"), ("critic", "reference")),
        ({"rank": 4, "roles": ["actor"]}, ("actor",), ("reference",)),
        ({"rank": 4, "roles": ["critic"]}, ("critic",), ()),
    ],
)
def test_who_has_adapters_and_who_shares(fields, adapted, sharing):
    lora = LoraConfig(**fields)
    assert tuple(role for role in ROLES if lora.of(role)) == adapted
    assert tuple(role for role in ROLES if lora.shares(role)) == sharing


def test_the_product_is_scaled_by_alpha_over_rank():
    assert LoraConfig(rank=8).factor == 4 and LoraConfig(rank=4, alpha=6).factor == 1.5
