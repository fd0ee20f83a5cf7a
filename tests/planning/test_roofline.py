"""Seconds by hand, in the limits, and against faster wires.

Whether a GPU reaches what its data sheet says, and what share of it, is not a test's to say.
"""

import dataclasses

import numpy as np
import pytest

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.known import known_shape
from vapo_megatron.planning import roofline
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.generation import _decode, _Rank, generation
from vapo_megatron.planning.plan import make_plan, resharding_seconds
from vapo_megatron.planning.workload import Loads, Workload, loads, response_lengths, workload_of

SHAPE = dataclasses.replace(
    known_shape("Qwen2.5-7B"),
    hidden_size=4,
    num_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=2,
    ffn_hidden_size=5,
    vocab_size=7,
)
# Round figures: 1 TFLOP/s of products and attention, 1 GB/s of memory, 1 GB/s each way on NVLink
# and on the network, no latency.
ROUND = Cluster(
    num_gpus=8,
    peak_tflops=1.0,
    matmul_share=1.0,
    attention_share=1.0,
    memory_gb_per_second=1.0,
    memory_share=1.0,
    decode_share=1.0,
    nvlink_gb_per_second=2.0,
    nvlink_share=1.0,
    network_gb_per_second=1.0,
    network_share=1.0,
    pcie_gb_per_second=1.0,
    pcie_share=1.0,
    collective_seconds=0.0,
    decode_step_seconds=0.0,
)
FAST_MEMORY = dataclasses.replace(ROUND, memory_gb_per_second=1e12)
WORKLOAD = Workload(
    num_responses=8,
    group_size=2,
    mini_batch_size=4,
    prompt_tokens=2,
    mean_response_tokens=6,
    max_response_tokens=6,
)
"""Responses of 6 tokens, sequences of 8: 36 pairs each."""


def config(world_size=8, **parallel):
    given = {"world_size": world_size, "max_tokens_per_microbatch": 8, "offload": False, **parallel}
    base = VapoConfig()
    return base.model_copy(update={"parallel": base.parallel.model_copy(update=given)})


# Layer, by hand: q, k, v and output 4 x 4 each, gate, up, down 4 x 5 each: 64 + 60 = 124 weights,
# 248 FLOPs a token and 2 * 4 * 2 = 16 a pair. Output: 7 x 4 weights, 56 FLOPs a position.
TOKEN, PAIR, OUTPUT = 248e-12, 16e-12, 56e-12


def test_forward_by_hand():
    one = config(world_size=1)
    phase = roofline.scoring(SHAPE, one, FAST_MEMORY, WORKLOAD, "critic")
    assert phase.seconds == pytest.approx(4 * 8 * (8 * TOKEN + 36 * PAIR), rel=1e-6)
    actor = roofline.scoring(SHAPE, one, FAST_MEMORY, WORKLOAD, "actor")
    assert actor.seconds - phase.seconds == pytest.approx(8 * 6 * OUTPUT, rel=1e-3)


def test_the_slowest_rank_counts():
    workload = dataclasses.replace(WORKLOAD, num_responses=6, mini_batch_size=3)
    phase = roofline.scoring(SHAPE, config(2), FAST_MEMORY, workload, "critic")
    updated = roofline.update(SHAPE, config(2), FAST_MEMORY, workload, "critic")
    # Two mini-batches of 3 on 2 ranks: the same rank has 2 of each, and 4 of 6 in all.
    assert phase.seconds == pytest.approx(4 * 4 * (8 * TOKEN + 36 * PAIR), rel=1e-6)
    assert phase.imbalance == pytest.approx(1 / 3) == updated.imbalance


def test_memory_by_hand():
    slow = dataclasses.replace(ROUND, peak_tflops=1e12)
    # Elements a token and layer: 10 * 4 norms and residuals, 2 * (4 + 4) rotary, 3 * 5 SwiGLU: 71,
    # 2 bytes each at 1 GB/s.
    one = config(world_size=1)
    phase = roofline.scoring(SHAPE, one, slow, WORKLOAD, "critic")
    assert phase.seconds == pytest.approx(4 * 8 * 8 * 71 * 2e-9)
    # Scores of a response token: 7, 32 bytes each.
    actor = roofline.scoring(SHAPE, one, slow, WORKLOAD, "actor")
    assert actor.seconds - phase.seconds == pytest.approx(8 * 6 * 7 * 32e-9)


def test_tensor_parallel_wires_by_hand():
    fast = dataclasses.replace(FAST_MEMORY, peak_tflops=1e12)
    two = config(world_size=2, tensor_model_parallel_size=2)
    phase = roofline.scoring(SHAPE, two, fast, WORKLOAD, "critic")
    # Two all-reduces a layer of 4 elements of 2 bytes a token: 2 * 2 * 1/2 * 8 bytes at 1 GB/s.
    assert phase.seconds == pytest.approx(4 * 64 * 16e-9)
    full = config(world_size=2, tensor_model_parallel_size=2, recompute="full")
    seconds = [roofline.update(SHAPE, c, fast, WORKLOAD, "critic").seconds for c in (two, full)]
    # Forward and backward once each, and forward again.
    assert seconds == pytest.approx([2 * phase.seconds, 3 * phase.seconds])


def test_recompute_is_one_more_forward_pass():
    none, selective, full = (
        roofline.update(SHAPE, config(1, recompute=r), FAST_MEMORY, WORKLOAD, "critic").seconds
        for r in ("none", "selective", "full")
    )
    # 8 sequences, 4 layers. Products: 1 + 2, or one more; attention: 1 + 2.5, or one more.
    products, attention = 4 * 64 * TOKEN, 4 * 8 * 36 * PAIR
    assert none == pytest.approx(3 * products + 3.5 * attention, rel=1e-6)
    assert selective == pytest.approx(3 * products + 4.5 * attention, rel=1e-6)
    assert full == pytest.approx(4 * products + 4.5 * attention, rel=1e-6)


def test_the_actors_output_is_always_computed_again():
    critic, actor = (
        roofline.update(SHAPE, config(1), FAST_MEMORY, WORKLOAD, role).seconds
        for role in ("critic", "actor")
    )
    assert actor - critic == pytest.approx(48 * 4 * OUTPUT, rel=1e-3)


@pytest.mark.parametrize(("vpp_size", "bubble"), [(None, 3.0), (2, 1.5)])
def test_a_pipeline_fills_and_drains(vpp_size, bubble):
    shape = dataclasses.replace(SHAPE, num_layers=8)
    split = config(4, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=vpp_size)
    fast = dataclasses.replace(FAST_MEMORY, network_gb_per_second=1e12, nvlink_gb_per_second=1e12)
    # 2 mini-batches of 4 micro-batches of one sequence; a stage has 2 layers: each mini-batch takes
    # 4 + (p - 1) / v of a micro-batch's time.
    phase = roofline.update(shape, split, fast, WORKLOAD, "critic")
    one = 2 * (3 * 8 * TOKEN + 3.5 * 36 * PAIR)
    assert phase.seconds == pytest.approx(2 * (4 + bubble) * one, rel=1e-6)
    assert phase.bubble == pytest.approx(bubble / (4 + bubble), rel=1e-6)
    # Scores go through the pipeline in one run of 8.
    scored = roofline.scoring(shape, split, fast, WORKLOAD, "critic")
    assert scored.bubble == pytest.approx(bubble / (8 + bubble), rel=1e-6)


def test_the_last_stage_has_the_output():
    split = config(2, pipeline_model_parallel_size=2)
    phase = roofline.scoring(SHAPE, split, FAST_MEMORY, WORKLOAD, "actor")
    sends = 8 * 4 * 2 / 1e9  # a micro-batch: 8 tokens of 4 elements of 2 bytes at 1 GB/s
    stage = 2 * (8 * TOKEN + 36 * PAIR) + sends
    assert phase.stages == pytest.approx(6 * OUTPUT / stage, rel=1e-3)
    assert phase.seconds == pytest.approx(8 * (stage + 6 * OUTPUT) + stage, rel=1e-3)


def test_data_parallel_wires_by_hand():
    fast = dataclasses.replace(FAST_MEMORY, peak_tflops=1e12)
    # 4 ranks in a node. Critic: 7 * 4 padded to 128 * 4 elements of embedding, 4 layers of 124
    # weights, 12 biases and 8 of norms, 4 of the last norm and 4 of the head.
    held = 512 + 4 * (124 + 12 + 8) + 4 + 4
    plain = roofline.update(SHAPE, config(4), fast, WORKLOAD, "critic")
    # Reduce-scatter of 4 bytes, all-gather of 2, 3/4 of them on the wire, twice.
    assert plain.seconds == pytest.approx(2 * 0.75 * 6 * held * 1e-9)
    replicated = config(4, use_distributed_optimizer=False)
    phase = roofline.update(SHAPE, replicated, fast, WORKLOAD, "critic")
    # All-reduce of 4 bytes.
    assert phase.seconds == pytest.approx(2 * 0.75 * 8 * held * 1e-9)


def test_an_updates_memory_by_hand():
    slow = dataclasses.replace(ROUND, peak_tflops=1e12)
    phase = roofline.update(SHAPE, config(1), slow, WORKLOAD, "critic")
    # 71 elements of 2 bytes a token and layer, forward and twice backward; 8 micro-batches add
    # gradients of 10 bytes; 2 updates read and write 42 + 4 bytes of the same parameters.
    held = 512 + 4 * (124 + 12 + 8) + 4 + 4
    passes = 3 * 4 * 64 * 71 * 2e-9
    assert phase.between_seconds == pytest.approx(2 * 46 * held * 1e-9)
    assert phase.seconds == pytest.approx(passes + 8 * 10 * held * 1e-9 + phase.between_seconds)
    # Of two ranks each owns half: the same work in half of the passes, and 42 / 2 + 4 bytes.
    fast_wires = dataclasses.replace(slow, nvlink_gb_per_second=1e12)
    half = roofline.update(SHAPE, config(2), fast_wires, WORKLOAD, "critic")
    assert half.between_seconds == pytest.approx(2 * 25 * held * 1e-9, rel=0.02)  # padding


def test_sequence_parallelism_divides_norms_and_sends():
    slow = dataclasses.replace(ROUND, peak_tflops=1e12, nvlink_gb_per_second=1e12)
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    # TP 2: 10 * 4 / 2 norms and residuals, 2 * (2 + 2) rotary, 3 * 2 SwiGLU (5 // 2): 34 elements.
    phase = roofline.scoring(SHAPE, config(2, **split), slow, WORKLOAD, "critic")
    assert phase.seconds == pytest.approx(4 * 64 * 34 * 2e-9)
    # Two stages in two nodes: 8 tokens of 4 / 2 elements of 2 bytes at 1 GB/s, 8 times and once.
    far = dataclasses.replace(slow, gpus_per_node=2, memory_gb_per_second=1e12)
    split["pipeline_model_parallel_size"] = 2
    phase = roofline.scoring(SHAPE, config(4, **split), far, WORKLOAD, "critic")
    assert phase.seconds == pytest.approx((8 + 1) * 8 * 2 * 2e-9)
    # Chunks overlap their messages.
    split["virtual_pipeline_model_parallel_size"] = 2
    phase = roofline.scoring(SHAPE, config(4, **split), far, WORKLOAD, "critic")
    assert phase.seconds < 1e-12


def test_more_passes_of_the_critic():
    often = dataclasses.replace(WORKLOAD, critic_updates_per_step=3)
    for role, factor in (("critic", 3), ("actor", 1)):
        one, many = (roofline.update(SHAPE, config(2), ROUND, w, role) for w in (WORKLOAD, often))
        assert many.seconds == pytest.approx(factor * one.seconds)
        assert many.between_seconds == pytest.approx(factor * one.between_seconds)


def test_overlap_hides_what_the_passes_take():
    hidden = config(4, overlap_grad_reduce=True, overlap_param_gather=True)
    slow = dataclasses.replace(FAST_MEMORY, peak_tflops=1e-6)
    phase = roofline.update(SHAPE, hidden, slow, WORKLOAD, "critic")
    assert phase.between_seconds == pytest.approx(0, abs=1e-15)


def test_rings():
    cluster = dataclasses.replace(ROUND, nvlink_gb_per_second=20.0)  # 10 each way
    assert cluster.ring_bytes(8) == 10e9
    # Stride 8: one member in each node, by its own adapter. Stride 2: four in each.
    assert cluster.ring_bytes(4, 8) == 1e9 and cluster.ring_bytes(16, 2) == 4e9
    assert cluster.ring_bytes(16, 1) == 8e9 and cluster.ring_bytes(4, 2) == 10e9
    assert cluster.all_gather_seconds(8e9, 4, 8) == pytest.approx(6.0)
    assert cluster.all_gather_seconds(8e9, 1) == 0
    assert cluster.neighbour_bytes(2, 4) == 10e9 and cluster.neighbour_bytes(2, 8) == 1e9


def test_decoding_by_hand():
    rank = _Rank(
        weight_seconds=10.0,
        token_seconds=0.0,
        cached_seconds=1.0,
        sequence_seconds=0.0,
        step_seconds=0.0,
    )
    # Prompts of 2, responses of 1 and 3. Together: the first step reads 3 + 3 tokens, 16 s; then
    # one is left with 4 and 5 tokens: 14 + 15 s.
    assert _decode(rank, np.array([1, 3]), 2, 2) == (45.0, 0.0)
    # One after the other: 13, then 13 + 14 + 15.
    assert _decode(rank, np.array([1, 3]), 2, 1) == (55.0, 0.0)
    # A batch of 4: both steps with one of them are less than half.
    assert _decode(rank, np.array([1, 3]), 2, 4) == (45.0, 29.0)


def test_decoding_is_bound_by_products_when_there_are_many():
    rank = _Rank(1.0, 0.5, 0.0, 0.25, 3.0)
    # 4 sequences: max(1, 2) + 1 + 3 a step.
    assert _decode(rank, np.array([5, 5, 5, 5]), 1, 4)[0] == pytest.approx(5 * 6.0)


def test_generation_by_hand():
    shape = dataclasses.replace(SHAPE, tied=True)
    workload = dataclasses.replace(WORKLOAD, num_responses=2, mini_batch_size=2)
    found = generation(shape, config(1), dataclasses.replace(ROUND, num_gpus=1), workload, 10**6)
    # Weights that are read, tied: 64 * 4 embedding rows and columns, 4 layers of 124 + 12 + 8,
    # 4 of the last norm: 836, 2 bytes each. Cache: 2 * 4 layers * 4 * 2 = 64 bytes a token; two
    # sequences of 3, ..., 8 tokens: 66. 6 steps.
    decode = 6 * 836 * 2e-9 + 66 * 64e-9
    # Prompt, once for both: 4 layers of 2 tokens and 3 pairs, one output.
    prefill = 4 * (2 * TOKEN + 3 * PAIR) + OUTPUT
    assert found.prefill_seconds == pytest.approx(prefill)
    assert found.seconds == pytest.approx(decode + prefill) and found.batch == 256
    # Untied, of 64 * 4 embedding elements more only the sampled tokens' rows are read.
    untied = generation(SHAPE, config(1), dataclasses.replace(ROUND, num_gpus=1), workload, 10**6)
    assert untied.seconds == pytest.approx(found.seconds)


def test_a_small_cache_samples_fewer_at_once():
    # A running sequence has 2 + 36 / 12 = 5 tokens on average.
    found = generation(SHAPE, config(1), ROUND, WORKLOAD, 17)
    assert found.batch == 3
    assert generation(SHAPE, config(1), ROUND, WORKLOAD, 4).batch == 1


@pytest.mark.parametrize(
    ("nvlink", "network", "wires"),
    [
        # Half of 2352 bytes through 2 adapters of .5 GB/s; 588 of 1176 that a rank lacks.
        (2.0, 0.5, 2 * 588),
        (0.5, 0.5, 4 * 588),
    ],
)
def test_sync_by_hand(nvlink, network, wires):
    # 2 nodes of 2; TP 2, so a node holds half of PP 2's layers. vLLM TP 2, feed-forward 6: its
    # shard has 64 / 2 * 4 elements of embedding and of output, 4 of the last norm, 4 layers of 24
    # (q, k, v), 6 (their biases), 8 (output), 36 (feed-forward), 8 (norms): 588, 1176 bytes.
    shape = dataclasses.replace(SHAPE, ffn_hidden_size=6)
    cluster = dataclasses.replace(
        ROUND,
        num_gpus=4,
        gpus_per_node=2,
        nvlink_gb_per_second=nvlink,
        network_gb_per_second=network,
    )
    c = config(4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    c = c.model_copy(
        update={"rollout": c.rollout.model_copy(update={"tensor_model_parallel_size": 2})}
    )
    # Then the shard is read and written.
    assert roofline.sync_seconds(shape, c, cluster) == pytest.approx((wires + 2352) * 1e-9)


def test_a_node_that_holds_everything_receives_nothing():
    cluster = dataclasses.replace(ROUND, num_gpus=2, gpus_per_node=2, nvlink_gb_per_second=1e12)
    c = config(2, pipeline_model_parallel_size=2)
    # vLLM TP 1: 2 * 64 * 4 elements, 4 of the last norm, 4 layers of 144: 1092, read and written.
    assert roofline.sync_seconds(SHAPE, c, cluster) == pytest.approx(2 * 2184e-9)


def test_sync_is_about_what_its_messages_take():
    shape = known_shape("Qwen2.5-0.5B")
    c = config(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    plan = make_plan(shape, c, Cluster(num_gpus=8, gpus_per_node=4), workload_of(c))
    # vLLM TP 1 on 2 nodes of 4.
    assert plan.sync_seconds == pytest.approx(resharding_seconds(shape, plan), rel=0.15)


LARGE = VapoConfig().model_copy(
    update={
        "parallel": VapoConfig().parallel.model_copy(
            update={
                "world_size": 32,
                "tensor_model_parallel_size": 4,
                "pipeline_model_parallel_size": 4,
                "sequence_parallel": True,
                "offload": True,
            }
        ),
        "rollout": VapoConfig().rollout.model_copy(update={"tensor_model_parallel_size": 4}),
        "algorithm": VapoConfig().algorithm.model_copy(
            update={"responses_per_step": 128, "mini_batch_size": 32}
        ),
    }
)


@pytest.mark.parametrize(
    "name",
    [
        "peak_tflops",
        "memory_gb_per_second",
        "nvlink_gb_per_second",
        "network_gb_per_second",
        "pcie_gb_per_second",
    ],
)
def test_twice_as_fast_is_never_slower(name):
    shape, cluster = known_shape("Qwen2.5-32B"), Cluster(num_gpus=32)
    faster = dataclasses.replace(cluster, **{name: 2 * getattr(cluster, name)})
    before, after = (
        make_plan(shape, LARGE, c, workload_of(LARGE)).seconds for c in (cluster, faster)
    )
    assert all(after[phase] <= before[phase] for phase in before)
    assert any(after[phase] < 0.999 * before[phase] for phase in before)


def test_twice_the_responses_take_twice_as_long():
    shape, cluster = known_shape("Qwen2.5-32B"), Cluster(num_gpus=32)
    workload = workload_of(LARGE)
    double = dataclasses.replace(workload, num_responses=2 * workload.num_responses)
    one, two = (roofline.update(shape, LARGE, cluster, w, "actor") for w in (workload, double))
    assert two.seconds == pytest.approx(2 * one.seconds, rel=1e-9)


def test_lengths_have_the_mean_and_the_maximum():
    workload = dataclasses.replace(
        WORKLOAD, num_responses=2048, mean_response_tokens=3100, max_response_tokens=3840
    )
    lengths = response_lengths(workload)
    assert lengths.mean() == pytest.approx(3100, abs=1)
    assert lengths.max() == 3840 and lengths.min() >= 1
    assert 400 < lengths.std() < 1000  # of a log-normal with the spread .5, cut off
    everything = dataclasses.replace(workload, mean_response_tokens=3840)
    assert (response_lengths(everything) == 3840).all()


def test_loads_add_up():
    workload = dataclasses.replace(
        WORKLOAD,
        num_responses=256,
        mini_batch_size=32,
        mean_response_tokens=50,
        max_response_tokens=100,
    )
    found = loads(workload, 4, 4, 256)
    # 8 mini-batches, of which 4 were packed: their lengths have the whole distribution in them.
    assert found.tokens.shape == (8, 4)
    assert (found.tokens[4:] == found.tokens[:4]).all() and len(set(found.tokens[:, 0])) == 4
    assert found.tokens.sum() == pytest.approx(256 * 52, rel=0.02)
    assert found.outputs.sum() == found.tokens.sum() - 256 * 2
    assert (found.micro_batches == found.micro_batches[:, :1]).all()
    assert isinstance(found, Loads)


def test_too_long_a_mean_is_refused():
    with pytest.raises(ValueError, match="mean response of 30000 tokens must lie between 1 and"):
        workload_of(VapoConfig(), mean_response_tokens=30000)
