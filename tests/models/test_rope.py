"""Rotary frequencies and rotation against transformers' functions and hand-made numbers.

Does not exercise a whole model: test_parity.py does, with every scaling.
"""

import dataclasses
import gc
import json
import math

import pytest
import torch
from transformers import AutoConfig, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding, apply_rotary_pos_emb

from tests.models import published
from vapo_megatron.models.hf_config import ModelShape, read_model_shape
from vapo_megatron.models.rope import Rotary, attention_factor, rope_frequencies, softmax_scale

SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, all its settings": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128,
        "beta_fast": 16, "beta_slow": 2, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.5,
    },
    "yarn, its factor given": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128,
        "attention_factor": 1.3,
    },
}  # fmt: skip

SHAPE = ModelShape(
    family="qwen2",
    hidden_size=64,
    num_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    ffn_hidden_size=64,
    vocab_size=128,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    tied=False,
    max_position_embeddings=512,
    qkv_bias=True,
    qk_norm=False,
    initializer_range=0.02,
)


def hf_config(scaling):
    return Qwen2Config(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, **scaling},
    )


def test_golden():
    # d = 4, theta = 100: 100^0 = 1 and 100^(-2/4) = 0.1; linear 4: a quarter of each.
    shape = dataclasses.replace(SHAPE, head_dim=4, rope_theta=100.0)
    assert rope_frequencies(shape).tolist() == pytest.approx([1, 0.1])
    shape = dataclasses.replace(shape, rope_scaling=SCALINGS["linear"])
    assert rope_frequencies(shape).tolist() == pytest.approx([0.25, 0.025])
    assert softmax_scale(shape) == 0.5
    # YaRN by 4: cosine and sine times 0.1 ln 4 + 1 = 1.13863, the scores times its square.
    shape = dataclasses.replace(shape, rope_scaling=SCALINGS["yarn"])
    assert softmax_scale(shape) == pytest.approx(0.5 * 1.1386294**2)


@pytest.mark.parametrize("name", SCALINGS)
def test_equals_transformers(name):
    scaling = SCALINGS[name]
    shape = dataclasses.replace(SHAPE, rope_scaling=scaling)
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](hf_config(scaling))
    assert torch.allclose(rope_frequencies(shape), theirs, rtol=1e-6, atol=0)
    assert attention_factor(shape) == pytest.approx(factor, rel=1e-12)
    assert not torch.allclose(rope_frequencies(shape), rope_frequencies(SHAPE), rtol=1e-3)


@pytest.mark.parametrize("name", [n for n in published.MODELS if n.startswith("Llama")])
def test_llamas_frequencies_are_exact(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published.MODELS[name]))
    theirs, factor = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(tmp_path))
    assert torch.equal(rope_frequencies(read_model_shape(tmp_path)), theirs) and factor == 1


def test_rotation_equals_transformers_on_packed_sequences():
    lengths = [3, 0, 5, 1]
    positions = torch.cat([torch.arange(n) for n in lengths])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    query, key = torch.randn(9, 2, 32), torch.randn(9, 1, 32)
    ours = Rotary(rope_frequencies(SHAPE))(query, key, cu_seqlens)
    config = hf_config({"rope_type": "default"})
    cos, sin = Qwen2RotaryEmbedding(config)(query, positions[None])
    theirs = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    for mine, other in zip(ours, theirs):
        assert (mine - other[0].transpose(0, 1)).abs().max() < 1e-6


def test_rotation_backwards():
    """A rotation by a: the gradient is rotated by -a, and lengths stay."""
    rotary = Rotary(torch.tensor([math.pi / 2, 0.3], dtype=torch.float64))
    x = torch.randn(4, 1, 4, dtype=torch.float64, requires_grad=True)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda q: rotary(q, q, bounds), (x,))
    rotated, _ = rotary(x, x, bounds)
    assert torch.allclose(rotated.norm(dim=-1), x.norm(dim=-1))
    # Position 1, first pair: a quarter turn takes (x0, x2) to (-x2, x0).
    assert torch.allclose(rotated[1, 0, [0, 2]], torch.stack([-x[1, 0, 2], x[1, 0, 0]]), atol=1e-7)


def test_a_table_is_made_once_for_a_batch_and_leaves_with_it(monkeypatch):
    rotary = Rotary(rope_frequencies(SHAPE))
    made = []
    plain = rotary._compute_table
    monkeypatch.setattr(rotary, "_compute_table", lambda *args: made.append(1) or plain(*args))
    query = torch.randn(9, 2, 32)
    first, second = (torch.tensor([0, 4, 9], dtype=torch.int32) for _ in range(2))
    for cu_seqlens in (first, first, second, first):
        rotary(query, query, cu_seqlens)
    assert len(made) == len(rotary._tables) == 2
    rotary(query.bfloat16(), query.bfloat16(), first)
    assert len(made) == 3 and len(rotary._tables) == 2
    del first, cu_seqlens
    gc.collect()
    assert len(rotary._tables) == 1
