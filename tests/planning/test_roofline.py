"""The trainer's seconds by hand.

Whether a GPU reaches what its data sheet says, and what share of it, is not a test's to say.
"""

import dataclasses

import pytest

from tests.planning.by_hand import FAST_MEMORY, OUTPUT, PAIR, ROUND, SHAPE, TOKEN, WORKLOAD, config
from tests.planning.shapes import changed
from vapo_megatron.planning import roofline


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


def test_the_host_is_a_floor_for_the_layers():
    one = config(world_size=1)
    free, hidden, slow = (
        dataclasses.replace(FAST_MEMORY, layer_host_seconds=seconds) for seconds in (0, TOKEN, 1)
    )

    def scored(cluster):
        return [
            roofline.scoring(SHAPE, one, cluster, WORKLOAD, role).seconds
            for role in ("critic", "actor")
        ]

    assert scored(hidden) == scored(free), "a microbatch computes 8 tokens in the meantime"
    # 4 layers of 8 microbatches; scores come on top.
    outputs = 8 * 6 * OUTPUT
    assert scored(slow) == pytest.approx([32, 32 + outputs], abs=outputs / 100)
    full = config(world_size=1, recompute="full")
    seconds = [roofline.update(SHAPE, c, slow, WORKLOAD, "critic").seconds for c in (one, full)]
    # Forward, backward at 1.2 times that, and forward again.
    assert seconds == pytest.approx([32 * 2.2, 32 * 3.2])


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


def test_latencies_by_hand():
    late = dataclasses.replace(
        FAST_MEMORY, peak_tflops=1e12, nvlink_gb_per_second=1e12, network_gb_per_second=1e12,
        collective_seconds=1e-3,
    )  # fmt: skip
    # 8 microbatches, 4 layers with 2 collectives each.
    phase = roofline.scoring(
        SHAPE, config(2, tensor_model_parallel_size=2), late, WORKLOAD, "critic"
    )
    assert phase.seconds == pytest.approx(8 * 4 * 2 * 1e-3, rel=1e-3)
    # One message for each of 8 microbatches, and one to fill; there and back in an update, whose
    # 2 mini-batches have 4 microbatches each.
    split = config(2, pipeline_model_parallel_size=2)
    phase = roofline.scoring(SHAPE, split, late, WORKLOAD, "critic")
    assert phase.seconds == pytest.approx((8 + 1) * 1e-3, rel=1e-3)
    phase = roofline.update(SHAPE, split, late, WORKLOAD, "critic")
    assert phase.seconds == pytest.approx(2 * (4 + 1) * 2 * 1e-3, rel=1e-3)


def test_tensor_parallel_ranks_share_products_pairs_and_scores():
    shape = dataclasses.replace(SHAPE, ffn_hidden_size=6, vocab_size=8)
    cluster = dataclasses.replace(FAST_MEMORY, nvlink_gb_per_second=1e12)
    for role in ("critic", "actor"):
        one, two = (
            roofline.scoring(shape, c, cluster, WORKLOAD, role).seconds
            for c in (config(1), config(2, tensor_model_parallel_size=2))
        )
        assert two == pytest.approx(one / 2, rel=1e-3)
    slow = dataclasses.replace(cluster, peak_tflops=1e12, memory_gb_per_second=1.0)
    one, two = (
        roofline.scoring(shape, c, slow, WORKLOAD, "actor").seconds
        - roofline.scoring(shape, c, slow, WORKLOAD, "critic").seconds
        for c in (config(1), config(2, tensor_model_parallel_size=2))
    )
    assert two == pytest.approx(one / 2, rel=1e-3)


def test_gradients_of_ranks_in_different_nodes_go_by_their_own_adapter():
    # TP 2 in each of 2 nodes of 2: ranks of DP 2 are 2 apart, each with an adapter of 1 GB/s,
    # NVLink 10 GB/s each way; TP 1 x DP 4: two of four ranks in each node, 2 GB/s.
    fast = dataclasses.replace(
        FAST_MEMORY, num_gpus=4, gpus_per_node=2, peak_tflops=1e12, nvlink_gb_per_second=1e12
    )
    shape = dataclasses.replace(SHAPE, ffn_hidden_size=6)
    # Critic: embedding 7 padded to 256, 128 * 4 on a rank; 4 layers of 68 weights, 6 biases and 8
    # of norms; 4 of the last norm and 4 of the head.
    held = 512 + 4 * (68 + 6 + 8) + 4 + 4
    split = config(4, tensor_model_parallel_size=2)
    phase = roofline.update(shape, split, fast, WORKLOAD, "critic")
    assert phase.between_seconds == pytest.approx(2 * 0.5 * 6 * held * 1e-9, rel=1e-3)
    held = 512 + 4 * (136 + 12 + 8) + 4 + 4
    phase = roofline.update(shape, config(4), fast, WORKLOAD, "critic")
    assert phase.between_seconds == pytest.approx(2 * 0.75 * 6 * held * 0.5e-9, rel=1e-3)


def test_stages_of_one_node_send_by_nvlink():
    fast = dataclasses.replace(FAST_MEMORY, peak_tflops=1e12, nvlink_gb_per_second=1e12)
    # PP 2 x DP 2: stages are 2 apart, 4 GPUs. Nodes of 4: NVLink. Nodes of 2: the network, 1 GB/s,
    # 8 tokens of 4 elements of 2 bytes for 4 microbatches of a rank and one to fill.
    split = config(4, pipeline_model_parallel_size=2)
    for per_node, expected in ((4, 0.0), (2, 5 * 8 * 8e-9)):
        cluster = dataclasses.replace(fast, gpus_per_node=per_node)
        phase = roofline.scoring(SHAPE, split, cluster, WORKLOAD, "critic")
        assert phase.seconds == pytest.approx(expected, rel=1e-3, abs=1e-12)


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


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({"recompute_method": "block", "recompute_num_layers": 1}, 1 / 4),
        ({"recompute_method": "block", "recompute_num_layers": 4}, 1),
        ({"recompute_num_layers": 2}, 1),
    ],
)
def test_some_layers_are_a_part_of_a_forward_pass(fields, share):
    """Of 4 layers."""
    seconds = [
        roofline.update(SHAPE, config(1, **c), FAST_MEMORY, WORKLOAD, "critic").seconds
        for c in ({"recompute": "none"}, {"recompute": "full", **fields})
    ]
    again = share * (4 * 64 * TOKEN + 4 * 8 * 36 * PAIR)
    assert seconds[1] - seconds[0] == pytest.approx(again, rel=1e-6)


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
    # 2 mini-batches of 4 microbatches of one sequence; a stage has 2 layers: each mini-batch takes
    # 4 + (p - 1) / v of a microbatch's time.
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
    sends = 8 * 4 * 2 / 1e9  # a microbatch: 8 tokens of 4 elements of 2 bytes at 1 GB/s
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
    # 71 elements of 2 bytes a token and layer, forward and twice backward; 8 microbatches add
    # gradients of 10 bytes; 2 updates read and write 42 + 4 bytes of the same parameters.
    held = 512 + 4 * (124 + 12 + 8) + 4 + 4
    passes = 3 * 4 * 64 * 71 * 2e-9
    assert phase.between_seconds == pytest.approx(2 * 46 * held * 1e-9)
    assert phase.seconds == pytest.approx(passes + 8 * 10 * held * 1e-9 + phase.between_seconds)
    # A frozen attention, q, k, v and output of 4 x 4 with 12 biases, has nothing to update.
    base = config(1)
    frozen = changed(base, algorithm={"freeze_critic_attention": True})
    part = roofline.update(SHAPE, frozen, slow, WORKLOAD, "critic")
    assert part.between_seconds == pytest.approx(2 * 46 * (held - 4 * 76) * 1e-9)
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
    # Half of a microbatch's pass hides that much: a pass over 8 tokens and 36 pairs in 4 layers,
    # for each of reducing (4 bytes) and gathering (2 bytes).
    fast = dataclasses.replace(FAST_MEMORY, peak_tflops=1.0)
    held = 512 + 4 * (124 + 12 + 8) + 4 + 4
    half = 4 * (3 * 8 * TOKEN + 3.5 * 36 * PAIR) / 2
    plain, reducing, gathering = (
        roofline.update(SHAPE, config(4, **overlap), fast, WORKLOAD, "critic").between_seconds
        for overlap in ({}, {"overlap_grad_reduce": True}, {"overlap_param_gather": True})
    )
    assert half < 0.75 * 2 * held * 1e-9
    assert plain - reducing == pytest.approx(2 * half, rel=1e-6)
    assert plain - gathering == pytest.approx(2 * half, rel=1e-6)


def test_rings():
    cluster = dataclasses.replace(ROUND, nvlink_gb_per_second=20.0)  # 10 each way
    assert cluster.ring_bytes(8) == 10e9
    # Stride 8: one member in each node, by its own adapter. Stride 2: four in each.
    assert cluster.ring_bytes(4, 8) == 1e9 and cluster.ring_bytes(16, 2) == 4e9
    assert cluster.ring_bytes(16, 1) == 8e9 and cluster.ring_bytes(4, 2) == 10e9
    assert cluster.all_gather_seconds(8e9, 4, 8) == pytest.approx(6.0)
    assert cluster.all_gather_seconds(8e9, 1) == 0
    assert cluster.neighbour_bytes(2, 4) == 10e9 and cluster.neighbour_bytes(2, 8) == 1e9
    # Adapters faster than NVLink do not help: the ring passes through the node.
    wide = dataclasses.replace(cluster, network_gb_per_second=5.0)
    assert wide.ring_bytes(16, 1) == 10e9 and wide.ring_bytes(4, 8) == 5e9


def test_context_parallel_ranks_share_the_work_and_send_keys_and_values():
    two = config(world_size=2, context_parallel_size=2)
    fast = dataclasses.replace(FAST_MEMORY, nvlink_gb_per_second=1e12, network_gb_per_second=1e12)
    phase = roofline.scoring(SHAPE, two, fast, WORKLOAD, "critic")
    assert phase.seconds == pytest.approx(4 * 8 * (8 * TOKEN + 36 * PAIR) / 2, rel=1e-6)
    actor = roofline.scoring(SHAPE, two, fast, WORKLOAD, "actor")
    assert actor.seconds - phase.seconds == pytest.approx(8 * 6 * OUTPUT / 2, rel=1e-3)
    # Keys and values of 64 tokens in 4 layers: 8 elements of 2 bytes, half of them another rank's.
    wires = dataclasses.replace(FAST_MEMORY, peak_tflops=1e12)
    phase = roofline.scoring(SHAPE, two, wires, WORKLOAD, "critic")
    assert phase.context_seconds == pytest.approx(4 * 64 * 8e-9)
    assert phase.seconds == pytest.approx(phase.context_seconds, rel=1e-3)
    # Backward they come again, and their gradients go; recomputed, once more.
    none, full = (
        roofline.update(SHAPE, c, wires, WORKLOAD, "critic")
        for c in (two, config(2, context_parallel_size=2, recompute="full"))
    )
    assert none.context_seconds == pytest.approx(3 * phase.context_seconds)
    assert full.context_seconds == pytest.approx(4 * phase.context_seconds)
    # Both hold the same parameters: gradients are reduced over them.
    replicas = roofline.update(SHAPE, config(2), wires, WORKLOAD, "critic")
    assert none.between_seconds == pytest.approx(replicas.between_seconds)
