"""Which weights Dion and Muon update, by model family, and the parts of a rank's shards.

What is made of them is tests/parallel/test_matrix_optimizer.py's.
"""

import pytest
import torch

from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.models.known import known_shape
from vapo_megatron.parallel.matrix_weights import put_rows, rows_of
from vapo_megatron.weights.table import rows

LINEAR = [f"self_attn.{x}_proj.weight" for x in "qkvo"]
LINEAR += [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
BIASES = [f"self_attn.{x}_proj.bias" for x in "qkv"]
QK_NORMS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
OUTSIDE = ["model.embed_tokens.weight", "model.norm.weight"]
FAMILIES = {
    # name of a model: what AdamW updates in its layers
    "Qwen2.5-32B": [*NORMS, *BIASES],
    "Qwen3-8B": [*NORMS, *QK_NORMS],
    "Llama-3.1-8B": NORMS,
}


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_linear_weights_of_layers_are_matrices_and_nothing_else(name, role):
    shape = known_shape(name)
    found = {True: set(), False: set()}
    for row in rows(shape, role):
        found[row.is_layer_matrix(shape)] |= {n.removeprefix("model.layers.{}.") for n in row.hf}
    for matrix, names in found.items():
        print(f"{name}, {role}, {'matrices' if matrix else 'AdamW'}: {', '.join(sorted(names))}")
    head = "lm_head.weight" if role == "actor" else "score.weight"
    assert found[True] == set(LINEAR)
    assert found[False] == {*FAMILIES[name], *OUTSIDE, head}


def _parts(hf_path, tp_size):
    """By HF name: rows of this rank's shard and of the whole tensor, and the description."""
    from tests.models.built import Layout, build
    from vapo_megatron.weights.gather import gather_hf_tensors
    from vapo_megatron.weights.load_hf import load_hf_weights
    from vapo_megatron.weights.matrices import trained_weights

    built = build(hf_path, Layout(tp=tp_size))
    load_hf_weights(built.chunks, built.shape, hf_path, built.ranks, "actor")
    tensors = gather_hf_tensors(built.chunks, built.shape, built.ranks)
    whole = {name: t.clone() for name, t in tensors}
    found, names = [], set()
    for weight in trained_weights(built.chunks, built.shape, built.ranks, "actor"):
        assert weight.name not in names
        names.add(weight.name)
        data = weight.parameter.detach()
        for part in weight.parts:
            own = rows_of(data, part.runs)
            expected = whole[part.name].narrow(
                weight.dim, part.bounds[0], part.bounds[1] - part.bounds[0]
            )
            assert torch.equal(own, expected), part.name
            assert tuple(whole[part.name].shape) == part.shape
            assert weight.layer == int(part.name.split(".")[2])
            found.append((part.name, own.numel()))
            # What is written back is where it was.
            changed = data.clone()
            put_rows(changed, part.runs, own * 2)
            if len(part.runs) > 1:
                assert torch.equal(rows_of(changed, part.runs), own * 2)
                assert (changed != data).sum() == own.numel()
    return found


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_shards_rows_are_those_of_its_matrices(workers, tmp_path, kv_heads):
    hf = str(write_tiny_hf(tmp_path, heads=4, kv_heads=kv_heads, num_layers=2))
    results = workers.run(4, _parts, hf, 4)
    (alone,) = workers.run(1, _parts, hf, 1)
    assert len(alone) == 14
    for index, (name, size) in enumerate(alone):
        of_ranks = [result[index] for result in results]
        assert {n for n, _ in of_ranks} == {name} and sum(s for _, s in of_ranks) == size
