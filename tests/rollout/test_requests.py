"""Seeds, shares and limits, pure.

Does not exercise: vLLM (test_engine.py).
"""

import json

import pytest

from vapo_megatron.config import RolloutConfig
from vapo_megatron.data.rollout import Prompt
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.rollout.requests import (
    SamplingSettings,
    assign,
    max_model_len,
    request_seed,
    start_groups,
)


def _prompt(index, token_ids=(4, 5)):
    return Prompt(index, f"problem {index}", tuple(token_ids), "0")


def test_seeds_never_change():
    # printf 0/0/train/0/0 | b2sum -l 64: e36eae42d48e148c; half of it
    assert request_seed(0, 0, "train", 0, 0) == 0xE36EAE42D48E148C // 2
    # printf 7/12/evaluation/4711/15 | b2sum -l 64: bb4b54a7b8c326f6
    assert request_seed(7, 12, "evaluation", 4711, 15) == 0xBB4B54A7B8C326F6 // 2
    # The first round is as if there were no others; printf 0/0/train/0/0/1 | b2sum -l 64
    assert request_seed(0, 0, "train", 0, 0, 0) == request_seed(0, 0, "train", 0, 0)
    assert request_seed(0, 0, "train", 0, 0, 1) == 0xAF2274849EC276F0 // 2


def test_every_part_of_a_request_moves_its_seed():
    base = (1, 2, "train", 3, 4)
    seeds = {request_seed(*base)}
    for changed in ((2, 2, "train", 3, 4), (1, 3, "train", 3, 4), (1, 2, "evaluation", 3, 4),
                    (1, 2, "train", 4, 4), (1, 2, "train", 3, 5), (1, 2, "train", 3, 4, 1),
                    (1, 2, "train", 3, 4, 2)):  # fmt: skip
        seeds.add(request_seed(*changed))
    assert len(seeds) == 8
    # Parts are separated: (1, 12) and (11, 2) are different requests.
    assert request_seed(0, 1, "train", 12, 0) != request_seed(0, 1, "train", 1, 20)
    # Torch's CPU generator reads the low 32 bits: all of 10,000 differ in them but for chance
    # (10,000^2 / 2^33 = 0.01 expected collisions).
    low = {request_seed(0, 0, "train", i, 0) % 2**32 for i in range(10_000)}
    assert len(low) >= 9_999


def seeds_of(prompts, sizes, **more):
    groups = start_groups(prompts, sizes, **{"seed": 0, "step": 0, "role": "train", **more})
    assert list(map(len, groups)) == sizes
    requests = [request for group in groups for request in group]
    assert [r.rollout.prompt for r in requests] == prompts
    assert [r.rollout.position for r in requests] == list(range(len(prompts)))
    assert [r.rollout.sample for r in requests] == [i for size in sizes for i in range(size)]
    return [r.seed for r in requests]


def test_seeds_do_not_depend_on_the_order_of_prompts():
    prompts = [_prompt(i) for i in (5, 5, 9, 9, 2, 2)]
    seeds = seeds_of(prompts, [2, 2, 2], seed=3, step=8)
    assert seeds[2:4] == [request_seed(3, 8, "train", 9, s) for s in (0, 1)]
    turned = seeds_of(prompts[2:] + prompts[:2], [2, 2, 2], seed=3, step=8)
    assert turned == seeds[2:] + seeds[:2]


def test_a_prompt_drawn_twice_in_a_step_is_sampled_anew():
    prompts = [_prompt(5)] * 2 + [_prompt(6)] * 3 + [_prompt(5)]
    seeds = seeds_of(prompts, [2, 3, 1])
    assert seeds[5:] == [request_seed(0, 0, "train", 5, 2)]
    assert len(set(seeds)) == 6
    later = seeds_of(prompts, [2, 3, 1], round=1)
    assert later[:2] == [request_seed(0, 0, "train", 5, s, 1) for s in (0, 1)]
    assert not set(later) & set(seeds)


def test_groups_must_be_groups():
    with pytest.raises(AssertionError, match=r"3 prompts are not groups of \[2, 2\]"):
        seeds_of([_prompt(1)] * 3, [2, 2])
    with pytest.raises(AssertionError, match="different prompts"):
        seeds_of([_prompt(1), _prompt(2)], [2])


def test_assign_golden():
    # 10 = 4 + 3 + 3
    assert assign(10, 3) == [range(0, 4), range(4, 7), range(7, 10)]
    assert assign(1, 2) == [range(0, 1), range(1, 1)]
    assert assign(0, 2) == [range(0, 0), range(0, 0)]


def test_assign_covers_each_position_once():
    for requests in [0, 1, 7, 64, 8192]:
        for replicas in [1, 2, 3, 16]:
            shares = assign(requests, replicas)
            assert [p for share in shares for p in share] == list(range(requests)), (
                requests,
                replicas,
            )
            assert len(shares) == replicas, (requests, replicas)
            assert max(map(len, shares)) - min(map(len, shares)) <= 1, (requests, replicas)


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"temperature": 0.005}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_settings_that_vllm_would_change_or_refuse(changed, named):
    good = {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_response_tokens": 5,
        "seed_role": "train",
    }  # fmt: skip
    SamplingSettings(**good)
    SamplingSettings(**{**good, "temperature": 0})
    with pytest.raises(ConfigError, match=named):
        SamplingSettings(**{**good, **changed})


def _shape(tmp_path, **scaling):
    config = {
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }  # fmt: skip
    if scaling:
        config["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_model_shape(tmp_path)


def test_lengths_stay_within_the_models_positions(tmp_path):
    shape = _shape(tmp_path)
    assert max_model_len(shape, RolloutConfig(max_prompt_tokens=12, max_response_tokens=500)) == 512
    too_long = RolloutConfig(max_prompt_tokens=13, max_response_tokens=500)
    with pytest.raises(ConfigError, match=r"max_prompt_tokens=13.*500 = 513.*embeddings=512"):
        max_model_len(shape, too_long)
    stretched = _shape(tmp_path, rope_type="yarn", factor=2.0, original_max_position_embeddings=512)
    with pytest.raises(
        ConfigError, match="or set it in config.json to what its yarn reaches, 1024"
    ):
        max_model_len(stretched, too_long)  # vLLM would refuse it, but late.
    stretched = _shape(tmp_path, rope_type="linear", factor=2.0)
    assert max_model_len(stretched, too_long) == 513
