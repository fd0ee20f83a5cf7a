"""The actor's weights in live vLLM models, bit for bit as from a freshly loaded export.

Real engines in 2 and 4 gloo processes, each filled with NaN before every sync, once awake and once
asleep (tests/rollout/vllm/poisoned_sleep.py). Does not exercise: GPUs, NCCL, more than one node,
vLLM with TP > 2.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.weights.loaded import Layout
from tests.weights.reshard import live_sync as jobs
from tests.weights.tiny_hf import write_tiny_hf, write_tiny_model

# vLLM on a CPU takes heads of 32. A vocabulary of 300 is padded to 320 there.
UNTIED = {"hidden": 128, "heads": 4, "kv_heads": 2}
# One key-value head: the tensor-parallel ranks of both sides share it.
TIED = {"hidden": 128, "heads": 4, "kv_heads": 1, "tied": True}
MIXTURE = {"hidden": 128, "heads": 4, "kv_heads": 2, "family": "qwen3_moe"}
ROUNDED = "rollout.dtype=bfloat16"
SLOW = pytest.mark.slow
RUNS = [
    # World size, model, vLLM's TP, Megatron's layouts (what is left over is data parallel).
    pytest.param((2, UNTIED, 1, [Layout(2, 1), Layout(1, 2), Layout(cp=2)]), id="2 x tp1"),
    pytest.param(
        (2, TIED, 2, [Layout(2, 1), Layout(1, 1), Layout(1, 2)], ROUNDED),
        id="tp2, tied, rounded",
        marks=SLOW,
    ),  # fmt: skip
    pytest.param(
        (4, UNTIED, 2, [Layout(2, 2), Layout(2, 2, 2), Layout(tp=2, cp=2)]),
        id="2 x tp2",
        marks=SLOW,
    ),
    pytest.param((4, TIED, 1, [Layout(2, 2)]), id="4 x tp1, tied", marks=SLOW),
    pytest.param((2, MIXTURE, 2, [Layout(2, ep=2)]), id="experts cut over 2"),
    pytest.param(
        (2, MIXTURE, 2, [Layout(cp=2, ep=2), Layout(1, 2), Layout()]),
        id="experts cut over 2, more",
        marks=SLOW,
    ),
    pytest.param(
        (2, MIXTURE, 2, [Layout(2, ep=2), Layout(), Layout(1, 2)], "rollout.expert_parallel=true"),
        id="whole experts on 2",
        marks=SLOW,
    ),
    pytest.param(
        (4, MIXTURE, 2, [Layout(2, cp=2, ep=4), Layout(2, 2, ep=2)]),
        id="2 x tp2, experts",
        marks=SLOW,
    ),
]


@pytest.mark.parametrize("run", RUNS)
def test_live_weights_and_responses_are_those_of_the_export(vllm_workers, tmp_path, run):
    world_size, model, rollout_tp, layouts, *overrides = run
    path = write_tiny_model(tmp_path / "model", **model)
    arguments = (tmp_path, path, rollout_tp, layouts, *overrides)
    results = vllm_workers.run(world_size, jobs.layouts_into_vllm, *arguments, timeout_seconds=280)
    for found in results:
        expected = found["expected"]
        # Embedding, norm, lm_head unless tied, and 4 layers of qkv and bias, o, gate_up, down, 2;
        # with experts the bias is missing, and the norms of q and k and the router are there.
        of_layer = 9 if model is MIXTURE else 7
        assert len(expected.weights) == 2 + ("tied" not in model) + 4 * of_layer
        assert len(expected.responses) == 2
        for number, layout in enumerate(layouts, 1):
            *both, policy_version, (cached_before, cached_after) = found[str(layout)]
            for sampled in both:
                wrong = [n for n, bits in sampled.weights.items() if bits != expected.weights[n]]
                assert wrong == [] and sampled.weights.keys() == expected.weights.keys()
                assert sampled.responses == expected.responses
            assert policy_version == 2 * number
            assert cached_before > 0 and cached_after == 0
        last = world_size - 1
        assert found["damaged"].startswith("RuntimeError: the engine's weights differ from the")
        name = jobs.LAST_ROWS_OF_MLP[model is MIXTURE]
        assert f"in 1 places: rank {last}: {name}, rows" in found["damaged"]


@pytest.fixture
def small(tmp_path):
    return write_tiny_hf(tmp_path / "small", num_layers=1, tied=True)


def test_a_plan_that_does_not_fit_is_refused_on_every_rank(workers, tmp_path, small):
    for found in workers.run(2, jobs.plans_that_do_not_fit, tmp_path, small):
        expected = {
            "extra": "in 1 places: rank 1: model.extra.weight gets 0 of its 6 elements",
            "lacking": "in 2 places: rank 0: model.norm.weight is not in the engine; rank 1",
            "type": "rank 0: model.norm.weight is torch.bfloat16, not torch.float32",
            "vocabulary": "rank 0: embedding.word_embeddings.weight has 192 rows, not 1024",
        }
        assert found.keys() == expected.keys()
        for name, text in expected.items():
            assert text in found[name], name
            # The sampler still has no version.
            assert found[name].startswith("RuntimeError: the plan does not fit")
            assert found[name].endswith(" None")


def test_every_third_version_is_compared_and_a_damaged_one_is_not_sampled(workers, tmp_path, small):
    for compared, error, version, received in workers.run(
        2, jobs.verified_versions, tmp_path, small
    ):
        # The first that is published, and multiples of 3 from there to 10.
        assert compared == [4, 6, 9]
        assert "in 1 places: rank 0: model.norm.weight, rows 0 to 63, columns 0 to 0" in error
        assert version is None
        # Each of 2 ranks is missing half of the matrices, in float32; norms are everywhere, padding
        # is 0: 300*64 embedding, 128*65 qkv and bias, 64*64 o, 192*64 gate_up, 64*96 down.
        assert received == 4 * (300 * 64 + 128 * 65 + 64 * 64 + 192 * 64 + 64 * 96)


def test_parameters_still_on_their_way_are_waited_for(workers, small):
    expected = workers.run(2, jobs.updates, small, False)
    assert expected[0] == expected[1] and expected[0][0] != expected[0][1]
    assert workers.run(2, jobs.updates, small, True) == expected


def test_what_is_compared_is_what_the_sampler_computes_with(workers, tmp_path, small):
    for error in workers.run(2, jobs.looked_up_afresh, tmp_path, small):
        assert "weights differ from the trainer's in 2 places: rank 0: model.norm.weight" in error


def expected_of(path, factor):
    """vLLM's tensors for TP = 1, from the file; a vocabulary of 300 is padded to 320."""
    hf = {name: factor * tensor for name, tensor in load_file(path / "model.safetensors").items()}
    layer = "model.layers.0."

    def joined(*names):
        return torch.cat([hf[layer + name] for name in names])

    heads = [f"self_attn.{x}_proj" for x in "qkv"]
    return {
        **{name: tensor for name, tensor in hf.items() if "_proj" not in name},
        "model.embed_tokens.weight": torch.nn.functional.pad(
            hf["model.embed_tokens.weight"], (0, 0, 0, 20)
        ),
        layer + "self_attn.qkv_proj.weight": joined(*(f"{h}.weight" for h in heads)),
        layer + "self_attn.qkv_proj.bias": joined(*(f"{h}.bias" for h in heads)),
        layer + "self_attn.o_proj.weight": joined("self_attn.o_proj.weight"),
        layer + "mlp.gate_up_proj.weight": joined("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        layer + "mlp.down_proj.weight": joined("mlp.down_proj.weight"),
    }


@pytest.mark.parametrize(
    ("layout", "rollout_workers"),
    [(Layout(2, 1), 2), pytest.param(Layout(1, 1), 1, marks=SLOW)],
    ids=str,
)
def test_samplers_of_their_own_receive_their_shard_once(
    workers, tmp_path, small, layout, rollout_workers
):
    size = layout.world_size + rollout_workers
    results = workers.run(size, jobs.between_sides, tmp_path, small, layout)
    trainers, received = results[: layout.world_size], results[layout.world_size :]
    for rank, found in enumerate(received, layout.world_size):
        assert found["untouched"], "a version that has arrived is not yet sampled with"
        for name, factor in (("first", 1), ("second", 2)):
            expected = expected_of(small, factor)
            assert found[name].keys() == expected.keys()
            wrong = [n for n, t in expected.items() if not torch.equal(found[name][n], t)]
            assert wrong == [], name
        assert found["version"] == 8 and found["compared"] == [7], "the first is always compared"
        assert found["ratio"] == 1 and found["total"] == rollout_workers
        assert f"rank {rank}: model.norm.weight, rows 0 to 63" in found["error"]
    assert {found["ratio"] for found in trainers} == {0}
    assert {found["error"] for found in trainers} == {received[0]["error"]}
