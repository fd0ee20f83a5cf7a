"""Parameters, gradients and optimizer states: golden numbers by hand, and against other files.

Parameters are compared with the trainer's and the sampler's pieces (weights/reshard), which live
models are checked against elsewhere. Real allocations are in test_memory_measured.py.
"""

import math

import pytest

from tests.planning.shapes import LAYER, VOCABULARY, make_config
from vapo_megatron.models.known import known_shape
from vapo_megatron.planning import model_bytes, parameters
from vapo_megatron.weights import holders, table
from vapo_megatron.weights.reshard import shards, vllm_layout


def test_a_stage_of_32b(shape):
    # 16 layers: n = 975353856, a multiple of lcm(4, 128); every parameter is one of 64.
    # bfloat16 parameters 2 n, float32 gradients 4 n, and of 12 n of the optimizer a quarter.
    n = 16 * LAYER
    middle = model_bytes.state_bytes(shape, make_config(), "actor", pp_rank=1)
    assert middle == (2 * n, 4 * n, 3 * n) == (1_950_707_712, 3_901_415_424, 2_926_061_568)


def test_first_and_last_stage_of_32b(shape):
    config = make_config()

    def elements(role, pp_rank):
        return model_bytes.state_bytes(shape, config, role, pp_rank=pp_rank).parameters // 2

    assert elements("actor", 0) == elements("critic", 0) == 16 * LAYER + VOCABULARY
    # The final norm has 5120, and so has the value head.
    assert elements("actor", 3) == 16 * LAYER + VOCABULARY + 5120
    assert elements("critic", 3) == 16 * LAYER + 5120 + 5120


def test_optimizer_without_sharding_and_in_float32(shape):
    n = 16 * LAYER
    whole = make_config(use_distributed_optimizer=False)
    assert model_bytes.state_bytes(shape, whole, "actor", pp_rank=1) == (2 * n, 4 * n, 12 * n)
    # Parameters in float32 are their own main parameters: 8 n of 4 ranks.
    wide = make_config(model={"dtype": "float32"})
    assert model_bytes.state_bytes(shape, wide, "actor", pp_rank=1) == (4 * n, 4 * n, 2 * n)


def test_owners_of_matrices_of_32b(shape):
    """A stage has 16 layers, its four replicas own four each, and one of them also what is small.

    A layer on one of 8 ranks has 60948480 elements in matrices and 11136 others. Bases of rank
    1280 have rows where the matrix is cut: q 640, o 640, gate, up and down 3456 each; of k and v
    128 each, of rank 256: 14909440 + 65536 elements.
    """
    config = make_config(optimizer={"actor_method": "dion"})
    state = model_bytes.state_bytes(shape, config, "actor", pp_rank=1)
    n, in_matrices, small, bases = 16 * LAYER, 60_948_480, 11_136, 14_974_976
    assert LAYER == in_matrices + small
    assert state[:2] == (2 * n, 4 * n)
    mean = (16 * (8 * in_matrices + 4 * bases + 12 * small)) / 4
    assert mean <= state.optimizer < 1.05 * mean
    assert mean == pytest.approx(2.19e9, rel=1e-3)
    # Without bases, and where the float32 parameters are the model's own.
    muon = make_config(optimizer={"actor_method": "muon"}, model={"dtype": "float32"})
    alone = model_bytes.state_bytes(shape, muon, "actor", pp_rank=1).optimizer
    assert alone == pytest.approx(16 * 4 * in_matrices / 4, rel=0.05)
    # The critic's is AdamW as before.
    n_bytes = model_bytes.state_bytes(shape, config, "critic", pp_rank=1).optimizer
    assert n_bytes == 3 * n


def test_what_is_frozen_has_its_parameters_alone(shape):
    # A layer's attention on one of 8 ranks: 5120 * 640 + 896 * 5120 + 896 = 7865216 elements.
    n, frozen = 16 * LAYER, 16 * 7_865_216
    config = make_config(algorithm={"freeze_critic_attention": True, "kl_coef": 0.1})
    learning = n - frozen
    critic = model_bytes.state_bytes(shape, config, "critic", pp_rank=1)
    assert critic == (2 * n, 4 * learning, 3 * learning)
    assert model_bytes.state_bytes(shape, config, "actor", pp_rank=1) == (2 * n, 4 * n, 3 * n)
    assert model_bytes.state_bytes(shape, config, "reference", pp_rank=1) == (2 * n, 0, 0)
    sharing = model_bytes.state_bytes(
        known_shape("Qwen2.5-0.5B"), make_config(1, 1, 1), "reference", pp_rank=0
    )
    assert sharing.parameters == 2 * 494_032_768, "a tied projection is no copy"


def test_buffers_are_padded_as_megatron_pads_them():
    # In reverse: 30 at 0, 100 from 64 to 164, 5 from 192 to 197; the end at a multiple of 128, or
    # of lcm(3, 128) = 384.
    assert model_bytes.padded_elements([5, 100, 30], 1) == 256
    assert model_bytes.padded_elements([5, 100, 30], 3) == 384
    assert model_bytes.padded_elements([1, 1, 1], 1) == 256  # 0, 64 and 128
    # A bucket ends once it has 40e6 elements: 40e6 + 1 -> 40000128, where the second begins.
    assert model_bytes.padded_elements([1, 40_000_001], 1, 40_000_000) == 40_000_256
    assert model_bytes.padded_elements([1, 40_000_001], 1) == 40_000_128


def test_buckets_are_of_the_first_stage_alone():
    shape = known_shape("Qwen2.5-0.5B")
    config = make_config(1, 2, 5, vllm_tp=1, overlap_grad_reduce=True)
    for stage, bucketed in ((0, True), (1, False)):
        (sizes,) = parameters.chunk_parameters(shape, config, "actor", pp_rank=stage)
        found = [model_bytes.padded_elements(sizes, 5, limit) for limit in (math.inf, 40_000_000)]
        assert found[0] != found[1]
        state = model_bytes.state_bytes(shape, config, "actor", pp_rank=stage)
        assert state.parameters == 2 * found[bucketed]


@pytest.mark.parametrize(
    "name,tp,pp,vpp",
    [
        ("Qwen2.5-32B", 8, 4, 2),
        ("Qwen2.5-3B", 8, 2, 1),  # tied, more ranks than key-value heads
        ("Qwen2.5-0.5B", 2, 1, 1),  # tied, one stage
        ("Qwen3-4B", 4, 2, 1),  # tied, with norms of query and key
        ("Llama-3.1-8B", 2, 4, 1),
    ],
)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_parameters_are_those_of_the_resharding_plan(name, tp, pp, vpp, role):
    # Pieces are without padding: each vocabulary's padding rows are added here.
    shape = known_shape(name)
    config = make_config(tp, pp, 1, vpp if vpp > 1 else None)
    layout = holders.trainer_layout(shape, tp_size=tp, pp_size=pp, vpp_size=vpp, dp_size=1)
    padding = (layout.vocab_rows - shape.vocab_size) * shape.hidden_size
    for stage in range(pp):
        expected = 0
        for row in table.rows(shape, role):
            inside = "{}" in row.hf[0]
            if not inside and layout.home(row)[0] != stage or row.is_copy and pp == 1:
                continue
            times = sum(last - first for first, last in layout.layers[stage]) if inside else 1
            for tp_rank in range(tp):
                pieces = shards.trainer_pieces(row, shape, layout, tp_rank)
                expected += times * sum(p.rows * p.columns for p in pieces)
            expected += padding if row.kind == "vocabulary" else 0
        chunks = parameters.chunk_parameters(shape, config, role, pp_rank=stage)
        assert len(chunks) == vpp
        assert tp * sum(map(sum, chunks)) == expected, stage


@pytest.mark.parametrize(
    "name,tp", [("Qwen2.5-32B", 4), ("Qwen2.5-3B", 8), ("Qwen2.5-0.5B", 2), ("Qwen3-4B", 1)]
)
def test_sampler_weights_are_those_of_the_resharding_plan(name, tp):
    shape = known_shape(name)
    expected = 0
    for row in table.rows(shape, "actor"):
        pieces = [p for r in range(tp) for p in vllm_layout.engine_pieces(row, shape, tp, r)]
        times = shape.num_layers if "{}" in row.hf[0] else 1
        expected += times * sum(p.rows * p.columns for p in pieces)
    padding = -shape.vocab_size % vllm_layout.VLLM_VOCAB_PADDING * shape.hidden_size
    expected += padding * (1 if shape.tied else 2)
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        config = make_config(1, 1, tp, vllm_tp=tp, rollout={"dtype": dtype})
        assert tp * model_bytes.engine_weight_bytes(shape, config) == size * expected
