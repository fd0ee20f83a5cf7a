"""The memory planner's arithmetic: golden numbers by hand for Qwen2.5-32B, against other files.

Parameters are compared with the trainer's and the sampler's pieces (weights/shards.py), which live
models are checked against elsewhere. Not exercised: real allocations (test_memory_measured.py), and
any GPU: the GPU column of activations.py and the constants of memory.py are from sources and code.
"""

import dataclasses
import subprocess
import sys

import pytest

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.known import known_shape
from vapo_megatron.parallel import score_chunks
from vapo_megatron.planning import activations, memory, model_bytes, plan
from vapo_megatron.weights import mapping, shards

GPU_BYTES = 80 * 10**9


def make_config(tp=8, pp=4, dp=4, vpp=None, *, vllm_tp=4, model=None, rollout=None, **parallel):
    """By default Qwen2.5-32B on 128 GPUs, as examples/configs has it."""
    return VapoConfig.model_validate(
        {
            "model": model or {},
            "parallel": {
                "world_size": tp * pp * dp,
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "virtual_pipeline_model_parallel_size": vpp,
                "sequence_parallel": tp > 1,
                "recompute": "full",
                "max_tokens_per_microbatch": 24576,
                **parallel,
            },
            "rollout": {"tensor_model_parallel_size": vllm_tp, **(rollout or {})},
        }
    )


@pytest.fixture
def shape():
    return known_shape("Qwen2.5-32B")


# A layer of Qwen2.5-32B on one of 8 tensor-parallel ranks. Query 40 * 128 = 5120, key 8 * 128 =
# 1024, projected (5120 + 2 * 1024) / 8 = 896 rows; feed-forward 27648 / 8 = 3456.
#   5120 * 640 + 896 * 5120 + 896 + 2 * 5120 + 3 * 3456 * 5120
# = 3276800 + 4587520 + 896 + 10240 + 53084160 = 60959616
LAYER = 60_959_616
# The vocabulary of 152064 is padded to a multiple of 128 * 8: 152576, 19072 rows of 5120 each.
VOCABULARY = 97_648_640


def test_a_stage_of_32b(shape):
    # 16 layers: n = 975353856, a multiple of lcm(4, 128); every parameter is one of 64.
    # bfloat16 parameters 2 n, float32 gradients 4 n, and of 12 n of the optimizer a quarter.
    n = 16 * LAYER
    middle = model_bytes.state_bytes(shape, make_config(), "actor", pp_rank=1)
    assert middle == (2 * n, 4 * n, 3 * n) == (1_950_707_712, 3_901_415_424, 2_926_061_568)
    assert middle.total == 9 * n


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


def test_buffers_are_padded_as_megatron_pads_them():
    # In reverse: 30 at 0, 100 from 64 to 164, 5 from 192 to 197; the end at a multiple of 128, or
    # of lcm(3, 128) = 384.
    assert model_bytes.padded_elements([5, 100, 30], 1, bucketed=False) == 256
    assert model_bytes.padded_elements([5, 100, 30], 3, bucketed=False) == 384
    assert model_bytes.padded_elements([1, 1, 1], 1, bucketed=False) == 256  # 0, 64 and 128
    # A bucket ends once it has 40e6 elements: 40e6 + 1 -> 40000128, where the second begins.
    assert model_bytes.padded_elements([1, 40_000_001], 1, bucketed=True) == 40_000_256
    assert model_bytes.padded_elements([1, 40_000_001], 1, bucketed=False) == 40_000_128


def test_buckets_are_of_the_first_stage_alone():
    shape = known_shape("Qwen2.5-0.5B")
    config = make_config(1, 2, 5, vllm_tp=1, overlap_grad_reduce=True)
    for stage, bucketed in ((0, True), (1, False)):
        (sizes,) = model_bytes.chunk_parameters(shape, config, "actor", pp_rank=stage)
        found = [model_bytes.padded_elements(sizes, 5, bucketed=flag) for flag in (False, True)]
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
    # weights/shards.py counts without padding: each vocabulary's padding rows are added here.
    shape = known_shape(name)
    config = make_config(tp, pp, 1, vpp if vpp > 1 else None)
    layout = shards.trainer_layout(shape, tp_size=tp, pp_size=pp, vpp_size=vpp, dp_size=1)
    padding = (layout.vocab_rows - shape.vocab_size) * shape.hidden_size
    for stage in range(pp):
        expected = 0
        for row in mapping.rows(shape, role):
            inside = "{}" in row.hf[0]
            if not inside and layout.stage_of(row) != stage or row.is_copy and pp == 1:
                continue
            times = sum(last - first for first, last in layout.layers[stage]) if inside else 1
            for tp_rank in range(tp):
                pieces = shards.trainer_pieces(row, shape, layout, tp_rank)
                expected += times * sum(p.rows * p.columns for p in pieces)
            expected += padding if row.kind == "vocabulary" else 0
        chunks = model_bytes.chunk_parameters(shape, config, role, pp_rank=stage)
        assert len(chunks) == vpp
        assert tp * sum(map(sum, chunks)) == expected, stage


@pytest.mark.parametrize(
    "name,tp", [("Qwen2.5-32B", 4), ("Qwen2.5-3B", 8), ("Qwen2.5-0.5B", 2), ("Qwen3-4B", 1)]
)
def test_sampler_weights_are_those_of_the_resharding_plan(name, tp):
    shape = known_shape(name)
    expected = 0
    for row in mapping.rows(shape, "actor"):
        pieces = [p for r in range(tp) for p in shards.sampler_pieces(row, shape, tp, r)]
        times = shape.num_layers if "{}" in row.hf[0] else 1
        expected += times * sum(p.rows * p.columns for p in pieces)
    padding = -shape.vocab_size % shards.VLLM_VOCAB_PADDING * shape.hidden_size
    expected += padding * (1 if shape.tied else 2)
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        config = make_config(1, 1, tp, vllm_tp=tp, rollout={"dtype": dtype})
        assert tp * model_bytes.sampler_weight_bytes(shape, config) == size * expected


def test_a_layer_of_32b_saves(shape):
    # On a GPU, for each token, with h = 5120 / 8 = 640, q = 640, k = 128, p = 896, F = 3456, n = 5:
    # norms      2 * 2 h = 2560 elements
    # attention  p + (q + k) + q = 2304 elements and 4 n = 20 bytes
    # MLP        3 F = 10368 elements
    # 2 * (2560 + 2304 + 10368) + 20 = 30484 bytes
    # selective: p + 2 q = 2176 elements and no statistics: 2 * (2560 + 2176 + 10368) = 30208 bytes
    # (8 key-value heads over 8 ranks: the query is a view of the projection: p + q = 1536)
    config = make_config()

    def saved(recompute, **options):
        of = dataclasses.replace(shape, **options)
        return activations.layer_bytes(of, config, tokens=1000, recompute=recompute)

    assert saved("none") == 30_484_000
    assert saved("selective") == 2 * (2560 + 1536 + 10368) * 1000
    assert saved("full") == 2 * 640 * 1000
    # With 16 key-value heads k = 256 and p = 1152, and the query is a copy.
    assert saved("selective", num_key_value_heads=16) == 2 * (2560 + 1152 + 1280 + 10368) * 1000
    # With 4 of them ranks gather the whole projection, 5120 + 2 * 512 = 6144.
    assert saved("none", num_key_value_heads=4) == 30_484_000 + 2 * (6144 - 896) * 1000


def test_without_sequence_parallelism_norms_are_whole(shape):
    # 4 norm tensors of 5120 in place of 640 elements.
    apart = make_config(sequence_parallel=False)
    found = activations.layer_bytes(shape, apart, tokens=10, recompute="none")
    assert found == (30_484 + 2 * 4 * (5120 - 640)) * 10
    assert activations.layer_bytes(shape, apart, tokens=10, recompute="full") == 2 * 5120 * 10


@pytest.mark.parametrize(
    "pp,vpp,expected",
    [
        (1, None, [1]),
        (4, None, [4, 3, 2, 1]),
        # 2 (pp - rank - 1) + (vpp - 1) pp + 1 chunks: 6 + 4 + 1 on the first of 4 stages.
        (4, 2, [11, 9, 7, 5]),
    ],
)
def test_chunks_in_flight(pp, vpp, expected):
    config = make_config(8, pp, 4, vpp)
    found = [activations.chunks_in_flight(config, pp_rank=rank) for rank in range(pp)]
    assert found == expected


def test_no_more_micro_batches_fly_than_there_are():
    tree = make_config(1, 4, 4).model_dump()
    tree["algorithm"] |= {"mini_batch_size": 8, "responses_per_step": 8, "group_size": 8}
    config = VapoConfig.model_validate(tree)
    # 8 responses over 4 ranks: two micro-batches at most.
    assert [activations.chunks_in_flight(config, pp_rank=r) for r in range(4)] == [2, 2, 2, 1]
    # A virtual pipeline fills them up to a multiple of 4 stages: 4 micro-batches of 2 chunks.
    tree["parallel"]["virtual_pipeline_model_parallel_size"] = 2
    config = VapoConfig.model_validate(tree)
    assert [activations.chunks_in_flight(config, pp_rank=r) for r in range(4)] == [8, 8, 7, 5]


def test_update_of_the_first_stage_of_32b(shape):
    # S = 24576 tokens, which is more than 2048 + 20480; 30484 bytes of a layer, 1280 of its input.
    # in flight   4 micro-batches * 16 layers * 1280 S                      2013265920
    # gathered    5120 * 2 S                                                 251658240
    # received    2 * 1280 S                                                  62914560
    # one layer   (30484 - 1280) S                                           717717504
    # backward    2 * (3456 (S + 5120)) + gathered = 456916992, for 2 * 2 * 3456 S = 339738624 and
    #             2 * ((10240 - 3456) S + 2 * 3456 * 5120) = 404226048       456916992
    # residual    2 * 1280 S                                                  62914560
    phases = memory.phase_memory(shape, make_config(), gpu_bytes=GPU_BYTES, pp_rank=0)
    assert phases["actor_update"].activations == 3_565_387_776
    assert phases["actor_update"].logits == 0
    assert phases["critic_update"] == phases["actor_update"]  # the head is elsewhere


def test_update_of_the_last_stage_of_32b(shape):
    # A chunk has 192 MiB / (4 * 19072) = 2639 rows, a tile 329:
    # 19072 * (2639 * 2 + 329 * 4) = 125760768 bytes of scores. Backward adds the hidden states'
    # gradient 2 * 5120 S = 251658240, 4 * VOCABULARY = 390594560 and a copy of 195297280 bytes,
    # larger than one slab (33554432) beside the scores, 159315200.
    phases = memory.phase_memory(shape, make_config(), gpu_bytes=GPU_BYTES, pp_rank=3)
    logits = 251_658_240 + 390_594_560 + 195_297_280
    assert phases["actor_update"].logits == logits
    # Old log-probabilities have the entropy, too: two tiles.
    assert phases["logprobs"].logits == 19072 * (2639 * 2 + 2 * 329 * 4)
    # One micro-batch in flight; the final norm keeps 1280 S, the hidden states take 2 * 5120 S;
    # what a layer adds in its backward pass comes after the logits are gone.
    s = 24576
    held = 16 * 1280 * s + 251_658_240 + 62_914_560 + 1280 * s + 10240 * s
    added = 717_717_504 + 456_916_992 + 62_914_560
    assert phases["actor_update"].activations == held + added - logits
    # The critic has no logits, and its head keeps float32: 4 * 640.
    critic = phases["critic_update"]
    assert critic.activations == held - 10240 * s + 2560 * s + added and critic.logits == 0


def test_backward_pass_of_a_layer():
    # Second of two stages, a critic: no embedding, no logits; H = 896, F = 4864, bfloat16.
    # S = 1000: gate, up and product   2 F S = 9728000, for F (S + H) = 9222144
    # S = 500:  second linear layer    F (S + H) = 6790144, for 4864000 and
    #           first linear layer     (2 H - F) S + 2 F H = 7180288
    # S = 800:  second                 F (S + H) = 8249344, for 7782400 and 6258688
    # Beside it 4 H S: the residual stream's gradient twice, and what is received.
    shape = known_shape("Qwen2.5-0.5B")
    config = make_config(1, 2, 1, vllm_tp=1, recompute="none")
    for tokens, added in ((1000, 9_728_000), (500, 7_180_288), (800, 8_249_344)):
        where = {"pp_rank": 1, "tokens": tokens}
        found, logits = activations.training_bytes(shape, config, "critic", **where)
        held = activations.saved_bytes(shape, config, "critic", **where)
        assert found - held == 2 * (added + 4 * 896 * tokens) and logits == 0
    # The first stage's embedding has a gradient of 151936 * 896, more than all that.
    where = {"pp_rank": 0, "tokens": 1000}
    found, _ = activations.training_bytes(shape, config, "critic", **where)
    held = activations.saved_bytes(shape, config, "critic", **where)
    assert found - held == 2 * (151_936 * 896 + 2 * 896 * 1000)


def test_a_forward_pass_without_gradients():
    # A token of Qwen2.5-0.5B on one GPU: 5 H + 3 F = 5 * 896 + 3 * 4864 = 19072 elements, more than
    # 4 H + q + 2k + 3 q + k = 4 * 896 + 4 * 896 + 3 * 128 = 7552.
    shape = known_shape("Qwen2.5-0.5B")
    config = make_config(1, 1, 1, vllm_tp=1)
    where = {"pp_rank": 0, "tokens": 1000}
    assert activations.inference_bytes(shape, config, "critic", **where) == (2 * 19_072_000, 0)
    # 192 MiB / (4 * 151936) = 331 rows of scores, two tiles of 41; a layer has more than both, and
    # they hide a part of it.
    logits = 151_936 * (331 * 2 + 2 * 41 * 4)
    found = activations.inference_bytes(shape, config, "actor", **where)
    assert found == (3 * 896 * 2 * 1000, logits)
    # All of 100 rows at once; a tile is an eighth of the largest chunk all the same.
    short = {"pp_rank": 0, "tokens": 100}
    found = activations.inference_bytes(shape, config, "actor", **short)
    assert found[1] == 151_936 * (100 * 2 + 2 * 41 * 4)
    long = {"pp_rank": 0, "tokens": 100_000}
    found = activations.inference_bytes(shape, config, "actor", **long)
    assert found == (2 * 1_907_200_000 - logits, logits)


def test_an_entropy_bonus_needs_another_tile():
    # With H = 64 the scores are larger than the output weight's gradient: 41 rows more in float32.
    shape = dataclasses.replace(known_shape("Qwen2.5-0.5B"), hidden_size=64)
    tree = make_config(1, 1, 1, vllm_tp=1).model_dump()
    sizes = []
    for tree["algorithm"]["entropy_coef"] in (0.0, 0.01):
        config = VapoConfig.model_validate(tree)
        where = {"pp_rank": 0, "tokens": 1000}
        sizes.append(activations.training_bytes(shape, config, "actor", **where)[1])
    assert sizes[1] - sizes[0] == 151_936 * 41 * 4


def test_norms_of_query_and_key_save_their_input():
    # Qwen3-4B on one GPU: q = 4096, k = 1024; the query that the norm takes is a copy.
    shape = known_shape("Qwen3-4B")
    plain = dataclasses.replace(shape, qk_norm=False)
    config = make_config(1, 1, 1, vllm_tp=1)

    def more(recompute):
        return [
            activations.layer_bytes(of, config, tokens=1, recompute=recompute)
            for of in (shape, plain)
        ]

    with_norm, without = more("none")
    assert with_norm - without == 2 * 4096
    with_norm, without = more("selective")  # the normed query and key stay beside it
    assert with_norm - without == 2 * (4096 + 1024)


def test_generation_of_32b(shape):
    # A layer of vLLM on 4 ranks: (1280 + 2 * 256) * 5120 + 1792 + 1280 * 5120 + 3 * 6912 * 5120
    # + 2 * 5120 = 121908992; 64 of them, the norm, and 152064 / 4 = 38016 rows twice.
    weights = 2 * (64 * 121_908_992 + 5120 + 2 * 38016 * 5120)
    phase = memory.phase_memory(shape, make_config(), gpu_bytes=GPU_BYTES, pp_rank=0)["generation"]
    assert phase.sampler_weights == weights == 16_382_928_896
    # 16384 tokens of 2 * 5120 + 3 * 6912 elements; 256 sequences of 152064 * 24 bytes.
    assert phase.activations == 16384 * 30976 * 2
    assert phase.logits == 934_281_216
    used = weights + phase.activations + phase.logits + 500_000_000 + 1_503_657_984
    assert phase.kv_cache == GPU_BYTES // 2 - used
    assert (phase.parameters, phase.gradients, phase.optimizer) == (0, 0, 0)
    # 2 * 64 layers * 2 key-value heads * 128 * 2 bytes
    assert memory.kv_cache_bytes_per_token(shape, make_config()) == 65_536
    tokens = memory.kv_cache_tokens(shape, make_config(), gpu_bytes=GPU_BYTES)
    assert tokens == phase.kv_cache // (16 * 65_536) * 16


def test_kv_cache_follows_its_settings(shape):
    def tokens(**rollout):
        config = make_config(rollout=rollout)
        return memory.kv_cache_tokens(shape, config, gpu_bytes=GPU_BYTES)

    assert tokens(kv_cache_bytes=2**30) == 2**30 // 65_536
    assert tokens(gpu_memory_utilization=0.2) == 0  # 16 GB: not even the weights
    more = tokens(enforce_eager=True) - tokens()
    assert more * 65_536 == pytest.approx(memory.CUDA_GRAPH_BYTES, rel=1e-3)
    # A smaller GPU makes vLLM take half as many tokens at once.
    phases = [
        memory.phase_memory(shape, make_config(), gpu_bytes=size, pp_rank=0)["generation"]
        for size in (70 * 2**30, 70 * 2**30 - 1)
    ]
    assert phases[0].activations == 2 * phases[1].activations
    wide = make_config(rollout={"dtype": "float32"})
    assert memory.kv_cache_bytes_per_token(shape, wide) == 2 * 65_536
    phase = memory.phase_memory(shape, wide, gpu_bytes=GPU_BYTES, pp_rank=0)["generation"]
    assert phase.activations == 2 * phases[0].activations
    # One key-value head for each of 16 ranks, though there are 8.
    wide = make_config(16, 2, 4, vllm_tp=16)
    assert memory.kv_cache_bytes_per_token(shape, wide) == 2 * 64 * 128 * 2


def test_what_is_not_at_work_leaves_the_gpu(shape):
    # Parameters of stage 0: 2 n of each role; 9 n while one trains.
    n = 16 * LAYER + VOCABULARY
    phases = memory.phase_memory(shape, make_config(), gpu_bytes=GPU_BYTES, pp_rank=0)
    assert tuple(phases) == memory.PHASES
    states = {x: (p.parameters, p.gradients, p.optimizer) for x, p in phases.items()}
    assert states == {
        "generation": (0, 0, 0),
        "values": (2 * n, 0, 0),
        "logprobs": (2 * n, 0, 0),
        "critic_update": (2 * n, 4 * n, 3 * n),
        "actor_update": (2 * n, 4 * n, 3 * n),
        "sync": (2 * n, 0, 0),
    }
    assert [x for x, p in phases.items() if p.kv_cache] == ["generation"]
    assert [x for x, p in phases.items() if p.sampler_weights] == ["generation", "sync"]
    # Two pairs of buckets of 512 MiB.
    assert [p.sync_buckets for p in phases.values()] == [0] * 5 + [2**31]


def test_without_offload_everything_stays(shape):
    n = 16 * LAYER + VOCABULARY
    away = memory.phase_memory(shape, make_config(), gpu_bytes=GPU_BYTES, pp_rank=0)
    config = make_config(offload=False)
    phases = memory.phase_memory(shape, config, gpu_bytes=GPU_BYTES, pp_rank=0)
    for name, phase in phases.items():
        assert (phase.parameters, phase.gradients, phase.optimizer) == (4 * n, 8 * n, 6 * n)
        assert phase.sampler_weights == away["generation"].sampler_weights
        assert phase.kv_cache == away["generation"].kv_cache > 0
        assert (phase.activations, phase.logits) == (away[name].activations, away[name].logits)
    assert memory.host_bytes_per_node(shape, config, gpus_per_node=8) == 0


def test_reserve(shape):
    phases = memory.phase_memory(shape, make_config(), gpu_bytes=GPU_BYTES, pp_rank=0)
    # TP, PP, DP, TP x PP, the world, and two of vLLM's; 7 neighbours; context and graphs.
    fixed = 7 * 688 * 2**20 + 7 * (3_280_000_000 // 7) + 500_000_000 + 1_503_657_984
    assert phases["sync"].reserve == phases["generation"].reserve == fixed
    update = phases["actor_update"]
    assert update.reserve == fixed + int(0.15 * update.activations)
    alone = known_shape("Qwen2.5-0.5B")
    config = make_config(1, 1, 1, vllm_tp=1, rollout={"enforce_eager": True})
    assert memory.phase_memory(alone, config, gpu_bytes=GPU_BYTES, pp_rank=0)["sync"] == (
        memory.PhaseMemory(
            parameters=model_bytes.state_bytes(alone, config, "actor", pp_rank=0).parameters,
            sampler_weights=model_bytes.sampler_weight_bytes(alone, config),
            reserve=500_000_000,
        )
    )


def test_total_is_the_sum_of_the_parts():
    names = [f.name for f in dataclasses.fields(memory.PhaseMemory)]
    phase = memory.PhaseMemory(**{name: 10**i for i, name in enumerate(names)})
    assert phase.total == 111_111_111


def test_the_first_stage_has_most_in_flight_and_the_last_the_logprobs(shape):
    first, last = (
        memory.phase_memory(shape, make_config(), gpu_bytes=GPU_BYTES, pp_rank=rank)
        for rank in (0, 3)
    )
    worst = plan.peak_memory(shape, make_config(), GPU_BYTES)
    assert worst["critic_update"] == first["critic_update"] != last["critic_update"]
    assert worst["logprobs"] == last["logprobs"] != first["logprobs"]


def test_step_of_torchs_adam_needs_room(shape):
    # 4 n / 4 bytes of square roots; with few tokens that is more than the activations.
    tokens = {"max_prompt_tokens": 8, "max_response_tokens": 56}
    small = {"max_tokens_per_microbatch": 64, "rollout": tokens}
    local = make_config(model={"layer_spec": "local"}, **small)
    phases = memory.phase_memory(shape, local, gpu_bytes=GPU_BYTES, pp_rank=1)
    assert phases["actor_update"].activations == 16 * LAYER
    fused = memory.phase_memory(shape, make_config(**small), gpu_bytes=GPU_BYTES, pp_rank=1)
    assert fused["actor_update"].activations < 16 * LAYER // 2


def test_a_long_sequence_exceeds_the_budget():
    config = make_config(max_tokens_per_microbatch=1024)
    assert activations.microbatch_tokens(config) == 2048 + 20480


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_recomputation_saves_memory(shape, role):
    sizes = []
    for recompute in ("full", "selective", "none"):
        config = make_config(recompute=recompute)
        sizes.append(sum(activations.training_bytes(shape, config, role, pp_rank=0, tokens=24576)))
    assert sizes == sorted(set(sizes))


def test_host_memory_of_a_node(shape):
    # 8 GPUs of the first stage: of each role 2 n of parameters and 3 n of optimizer state.
    n = 16 * LAYER + VOCABULARY
    found = memory.host_bytes_per_node(shape, make_config(), gpus_per_node=8)
    assert found == 8 * 2 * 5 * n == 85_840_199_680
    one = make_config(1, 1, 1, vllm_tp=1)
    small = known_shape("Qwen2.5-0.5B")
    assert memory.host_bytes_per_node(small, one, gpus_per_node=8) == sum(
        s.parameters + s.optimizer
        for s in (
            model_bytes.state_bytes(small, one, role, pp_rank=0) for role in ("actor", "critic")
        )
    )


def test_checkpoint_of_32b(shape):
    # A layer has 487605248 parameters, the padded vocabulary 152576 * 5120 = 781189120.
    # actor   64 * 487605248 + 5120 + 2 * 781189120        = 32769119232
    # critic  64 * 487605248 + 5120 + 781189120 + 5120     = 31987935232
    # 14 bytes each: bfloat16, and float32 main parameters and two moments.
    elements = 32_769_119_232 + 31_987_935_232
    assert memory.checkpoint_bytes(shape, make_config()) == 14 * elements == 906_598_762_496
    # Of float32 parameters the distributed optimizer writes its shards again.
    wide = make_config(model={"dtype": "float32"})
    assert memory.checkpoint_bytes(shape, wide) == 16 * elements
    whole = make_config(model={"dtype": "float32"}, use_distributed_optimizer=False)
    assert memory.checkpoint_bytes(shape, whole) == 12 * elements


def test_constants_are_those_of_the_files_that_load_torch():
    assert activations.CHUNK_BYTES == score_chunks.CHUNK_BYTES
    assert activations.SLAB_BYTES == score_chunks.SLAB_BYTES
    assert model_bytes.SAMPLER_VOCAB_PADDING == shards.VLLM_VOCAB_PADDING


def test_plans_start_without_torch():
    heavy = ("torch", "megatron", "vllm")
    code = (
        "import vapo_megatron.planning.memory, sys; "
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
