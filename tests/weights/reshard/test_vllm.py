"""The loader rules that test_planner.py assumes, against vLLM's own loaders.

The loaders run on parameters of plain integers, without an engine or process groups; the engine's
own shapes and names are compared where weights are sent into it. Importing vLLM takes a while:

    pytest -m slow tests/weights/reshard/test_vllm.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
from types import SimpleNamespace
import torch
from torch.nn import Parameter
import vapo_megatron.rollout.vllm.engine
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from tests.weights.reshard.cases import symbols
from vapo_megatron.models.known import known_shape
from vapo_megatron.weights.table import rows

def parameter(size, **dims):
    found = Parameter(torch.full(size, -1.0), requires_grad=False)
    for name, value in dims.items():
        setattr(found, name, value)
    return found

def loaded(row, shape, full, size, rank, tp):
    if row.kind == "qkv":
        kv = shape.num_key_value_heads
        layer = SimpleNamespace(
            tp_rank=rank, num_heads=shape.num_attention_heads // tp, head_size=shape.head_dim,
            v_head_size=shape.head_dim, num_kv_heads=max(1, kv // tp),
            num_kv_head_replicas=max(1, tp // kv), validate_shard_id=lambda shard: True,
        )
        result = parameter(size, output_dim=0)
        for shard, tensor in zip("qkv", full):
            QKVParallelLinear.weight_loader(layer, result, tensor, shard)
        return result
    if row.kind == "gate_up":
        layer = SimpleNamespace(
            tp_rank=rank, tp_size=tp, output_sizes=[shape.ffn_hidden_size] * 2,
            validate_shard_id=lambda shard: True,
        )
        result = parameter(size, output_dim=0)
        for shard, tensor in enumerate(full):
            MergedColumnParallelLinear.weight_loader(layer, result, tensor, shard)
        return result
    if row.kind == "row":
        result = parameter(size, input_dim=1)
        layer = SimpleNamespace(tp_rank=rank, tp_size=tp)
        RowParallelLinear.weight_loader(layer, result, full[0])
        return result
    if row.kind == "vocabulary":
        padded = -(-shape.vocab_size // 64) * 64
        layer = SimpleNamespace(org_vocab_size=shape.vocab_size)
        layer.shard_indices = VocabParallelEmbedding._get_indices(
            padded, padded, shape.vocab_size, shape.vocab_size, rank, tp
        )
        result = parameter(size, output_dim=0)
        VocabParallelEmbedding.weight_loader(layer, result, full[0])
        return result

compared = 0
for model, sizes in (
    ("Qwen2.5-0.5B", (1, 2)), ("Qwen2.5-7B", (1, 2, 4)), ("Qwen2.5-32B", (2, 8)),
    ("Qwen2.5-1.5B", (4,)), ("Qwen2.5-3B", (8,)),
):
    shape = known_shape(model)
    for tp in sizes:
        for row in rows(shape, "actor"):
            if row.is_copy or row.kind == "replicated":
                continue
            found = symbols(shape, row, 1, tp, shape.vocab_size)
            whole = torch.from_numpy(found.trainer[0]).double()
            heights = [size[0] for size in row.shapes(shape)]
            if row.kind == "qkv":
                from vapo_megatron.weights.layout import split_qkv
                full = split_qkv(
                    whole, num_groups=shape.num_key_value_heads, head_dim=shape.head_dim
                )
            else:
                full = whole.split(heights)
            for rank, expected in enumerate(found.sampler):
                expected = torch.from_numpy(expected).double()
                result = loaded(row, shape, full, expected.shape, rank, tp).double()
                if row.kind == "vocabulary":
                    result[expected < 0] = -1
                assert torch.equal(result, expected), (model, tp, row.hf, rank)
                compared += 1
print("compared", compared)
"""


@pytest.mark.slow
def test_loader_rules():
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=root, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Ranks times rows of the table that are cut: 6, and 7 where the output is not tied.
    assert done.stdout.split()[-2:] == [
        "compared",
        str(6 * (1 + 2 + 4 + 8) + 7 * (1 + 2 + 4 + 2 + 8)),
    ]
