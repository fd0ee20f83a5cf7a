"""Seconds of a sync by hand, and all seconds on faster wires and with more to do."""

import dataclasses

import pytest

from tests.planning.by_hand import ROUND, SHAPE, config
from tests.planning.shapes import changed
from vapo_megatron.config import VapoConfig
from vapo_megatron.models.known import known_shape
from vapo_megatron.planning import roofline, sync_time
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.plan import make_plan, resharding_seconds
from vapo_megatron.planning.workload import workload_of


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
    c = changed(c, rollout={"tensor_model_parallel_size": 2})
    # Then the shard is read and written.
    assert sync_time.sync_seconds(shape, c, cluster) == pytest.approx((wires + 2352) * 1e-9)


def test_a_node_that_holds_everything_receives_nothing():
    cluster = dataclasses.replace(ROUND, num_gpus=2, gpus_per_node=2, nvlink_gb_per_second=1e12)
    c = config(2, pipeline_model_parallel_size=2)
    # vLLM TP 1: 2 * 64 * 4 elements, 4 of the last norm, 4 layers of 144: 1092, read and written.
    assert sync_time.sync_seconds(SHAPE, c, cluster) == pytest.approx(2 * 2184e-9)


def test_sync_is_about_what_its_messages_take():
    shape = known_shape("Qwen2.5-0.5B")
    c = config(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    plan = make_plan(shape, c, Cluster(num_gpus=8, gpus_per_node=4), workload_of(c))
    # vLLM TP 1 on 2 nodes of 4.
    assert plan.sync_seconds == pytest.approx(resharding_seconds(shape, plan), rel=0.15)


LARGE = changed(
    VapoConfig(),
    parallel={
        "world_size": 32, "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 4,
        "sequence_parallel": True, "offload": True,
    },
    rollout={"tensor_model_parallel_size": 4},
    algorithm={"responses_per_step": 128, "mini_batch_size": 32},
)  # fmt: skip


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
