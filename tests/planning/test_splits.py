"""Plans in which some GPUs train and others sample: bytes of each side, seconds, splits."""

import dataclasses
import types

import pytest

from tests.planning.by_hand import ROUND, SHAPE, WORKLOAD
from tests.planning.by_hand import config as tiny
from tests.planning.shapes import GPU_BYTES, make_config
from tests.planning.test_plan import SMALL, SMALL_BASE, SMALL_SHAPE
from vapo_megatron.cli import preflight
from vapo_megatron.config import load_config
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.known import known_shape
from vapo_megatron.planning import memory, splits
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.describe import describe_gain, dry_run_comment, to_paste
from vapo_megatron.planning.generation import generation
from vapo_megatron.planning.host_memory import (
    host_bytes_per_node,
    rollout_host_bytes,
    step_host_bytes,
)
from vapo_megatron.planning.misfits import check_fits, find_misfit
from vapo_megatron.planning.model_bytes import engine_weight_bytes
from vapo_megatron.planning.plan import make_plan, peak_memory
from vapo_megatron.planning.ranking import (
    Fixed,
    rank,
    with_largest_share,
    with_parallel,
    with_rollout,
)
from vapo_megatron.planning.splits import rank_splits
from vapo_megatron.planning.sync_time import sync_seconds
from vapo_megatron.planning.workload import workload_of
from vapo_megatron.rollout.inputs import Inputs

SHAPE_32B = known_shape("Qwen2.5-32B")
ONE_STEP_OFF = [
    "examples/configs/qwen2.5_base.yaml",
    "examples/configs/qwen2.5_32b.yaml",
    "examples/configs/one_step_off.yaml",
]


def apart(config, rollout_workers, lag=1, **rollout):
    """The same trainers, and rollout workers of their own."""
    fields = {"placement": "disaggregated", "num_processes": rollout_workers, "lag": lag}
    return with_rollout(config, **fields, **rollout)


@pytest.mark.parametrize("offload", [True, False])
def test_each_side_holds_its_own(offload):
    """Where GPUs of their own sample: vLLM alone there, nothing of vLLM's on the others."""
    colocated = make_config(offload=offload)
    together, sides = (
        memory.phase_memory(SHAPE_32B, config, gpu_bytes=GPU_BYTES, pp_rank=0)
        for config in (colocated, apart(colocated, 64))
    )
    assert list(sides) == list(together)
    sampling = sides.pop("generation")
    assert sampling.parameters == sampling.gradients == sampling.optimizer == 0
    weights, buckets = engine_weight_bytes(SHAPE_32B, colocated), 4 * 2**29
    assert sampling.engine_weights == weights and sampling.sync_buckets == buckets
    assert sampling.kv_cache == together["generation"].kv_cache
    # CUDA, vLLM's graphs, 7 peers; NCCL of all processes, and of vLLM's TP twice.
    least = 500_000_000 + memory.CUDA_GRAPH_BYTES + 7 * memory.NCCL_PEER_BYTES
    assert sampling.reserve == least + 3 * memory.NCCL_COMMUNICATOR_BYTES
    for name, phase in sides.items():
        before = together[name]
        assert phase.engine_weights == phase.kv_cache == 0
        assert phase.optimizer == before.optimizer and phase.activations == before.activations
        saved = memory.CUDA_GRAPH_BYTES + 2 * memory.NCCL_COMMUNICATOR_BYTES
        assert before.reserve - phase.reserve == saved
        assert before.parameters == phase.parameters


def test_fp8_copies_are_the_trainers():
    config = apart(make_config(model={"fp8": "hybrid"}), 64)
    found = memory.phase_memory(SHAPE_32B, config, gpu_bytes=GPU_BYTES, pp_rank=0)
    assert found["generation"].parameters == 0 < found["sync"].parameters


def test_what_does_not_fit_names_its_side():
    cluster = Cluster(num_gpus=192)
    config = apart(make_config(offload=True), 64)

    def reason(config):
        phases = peak_memory(SHAPE_32B, config, GPU_BYTES)
        misfit = find_misfit(SHAPE_32B, config, cluster, phases)
        return misfit and misfit.reason

    assert reason(config) is None
    assert reason(with_rollout(config, gpu_memory_utilization=0.99)).startswith(
        "generation on a rollout worker's GPU needs "
    )
    assert reason(with_rollout(config, gpu_memory_utilization=0.25)).startswith(
        "generation on a rollout worker's GPU leaves vLLM a KV cache of "
    )
    assert reason(with_parallel(config, max_tokens_per_microbatch=10**6)).startswith(
        "critic_update on a trainer's GPU needs "
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["parallel.virtual_pipeline_model_parallel_size=null",
             "parallel.pipeline_model_parallel_size=1"],
            "actor_update on a trainer's GPU needs .*; raise parallel.tensor_model_parallel_size=2",
        ),
        (
            ["rollout.kv_cache_bytes=80000000000"],
            "on a rollout worker's GPU needs .*lower rollout.kv_cache_bytes=80000000000 or",
        ),
        (
            ["rollout.gpu_memory_utilization=0.15"],
            "on a rollout worker's GPU leaves vLLM a KV .*raise rollout.gpu_memory_utilization",
        ),
    ],
)  # fmt: skip
def test_a_run_is_refused_for_either_side(overrides, message):
    config = load_config(ONE_STEP_OFF, ["rollout.num_processes=32"])
    check_fits(config, SHAPE_32B, GPU_BYTES)
    with pytest.raises(ConfigError, match=message) as error:
        more = ["rollout.num_processes=32", *overrides]
        check_fits(load_config(ONE_STEP_OFF, more), SHAPE_32B, GPU_BYTES)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("gigabytes", "refused"), [(10, True), (400, False)])
def test_a_disaggregated_run_asks_its_gpu(monkeypatch, gigabytes, refused):
    """The GPU's size is made up."""
    import torch

    gpu = types.SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda rank: gpu)
    monkeypatch.setattr(preflight, "check_inputs", lambda *_: Inputs(SHAPE_32B))
    config = load_config(ONE_STEP_OFF, ["rollout.num_processes=32"])
    if not refused:
        preflight.check_rank(config, None)
        return
    with pytest.raises(ConfigError, match="cannot fit into a GPU: .* on a "):
        preflight.check_rank(config, None)


def test_host_memory_of_samplers_by_hand():
    algorithm = {"responses_per_step": 64, "group_size": 2, "mini_batch_size": 32}
    rollout = {"max_prompt_tokens": 100, "max_response_tokens": 900, "max_num_sequences": 8}
    config = apart(
        make_config(8, 4, 4, rollout=rollout, algorithm=algorithm), 16, lag=2,
        tensor_model_parallel_size=4,
    )  # fmt: skip
    found = rollout_host_bytes(SHAPE_32B, config, 8)
    # 16 responses on each of 4 replicas; 8 at once on each of 8 ranks, 260 bytes a token; two
    # replicas' first ranks keep 3 steps, 12 bytes a token.
    assert found.step == 8 * 8 * 900 * 260 + 2 * 3 * 16 * 900 * 12
    assert found.staged == 8 * 4 * engine_weight_bytes(SHAPE_32B, config)
    assert found.offloaded == found.checkpoint == 0
    assert rollout_host_bytes(SHAPE_32B, apart(config, 16, lag=0), 8).staged == 0


def test_host_memory_of_nodes():
    """The node that needs most; a node of both sides has the parts of both."""
    config = apart(make_config(2, 1, 2, offload=True), 4)
    trainers = host_bytes_per_node(SHAPE_32B, config, gpus_per_node=4)
    rollout_workers = rollout_host_bytes(SHAPE_32B, config, 4)
    assert trainers.staged == 0 < trainers.offloaded
    shared = host_bytes_per_node(SHAPE_32B, config, gpus_per_node=8)
    assert shared.staged == rollout_workers.staged and shared.offloaded == trainers.offloaded
    assert shared.total == trainers.total + rollout_workers.total
    # One trainer, vLLM on two: no replica fits into the trainers, and none is counted there.
    assert step_host_bytes(apart(make_config(1, 1, 1), 2), keeps_rollouts=True) > 0
    # Many versions outweigh the trainers.
    many = apart(make_config(8, 4, 4, offload=False), 32, lag=20)
    many = with_parallel(many, host_memory_gb=1000.0)
    found = host_bytes_per_node(SHAPE_32B, many, gpus_per_node=8)
    assert found.offloaded == 0 < found.staged
    nothing = {"sync": memory.PhaseMemory()}
    reason = find_misfit(SHAPE_32B, many, Cluster(num_gpus=160), nothing).reason
    assert f"and 22 versions of the weights {found.staged / 1e9:.1f}, of a node's 1000.0" in reason


def test_the_samplers_are_those_that_generate():
    """Half of the GPUs sample the same as a cluster of half the size."""
    half = dataclasses.replace(ROUND, num_gpus=4)
    expected = generation(SHAPE, tiny(4), half, WORKLOAD, 10**6)
    found = generation(SHAPE, apart(tiny(4), 4), ROUND, WORKLOAD, 10**6)
    assert (
        found == expected
        and expected.seconds > 1.1 * generation(SHAPE, tiny(8), ROUND, WORKLOAD, 10**6).seconds
    )


def test_weights_between_the_worlds_by_hand():
    shard = engine_weight_bytes(SHAPE, tiny())
    # One node: 6 rollout workers receive over NVLink what 2 trainers send, 1 GB/s each. Memory,
    # 1 GB/s: read and written.
    config = apart(tiny(2), 6, lag=0)
    assert sync_seconds(SHAPE, config, ROUND) == pytest.approx((3 + 2) * shard / 1e9)
    # With a lag to host memory, 1 GB/s.
    assert sync_seconds(SHAPE, apart(tiny(2), 6), ROUND) == pytest.approx(6 * shard / 1e9)
    # Nodes of 2: each of 3 sampling nodes receives the model over 2 adapters; 2 trainers send 3.
    nodes = dataclasses.replace(ROUND, gpus_per_node=2)
    assert sync_seconds(SHAPE, config, nodes) == pytest.approx((1.5 + 2) * shard / 1e9)
    # 6 trainers, one sampling node of 2: the node's adapters limit, and NVLink within it.
    config = apart(tiny(6), 2, lag=0)
    assert sync_seconds(SHAPE, config, nodes) == pytest.approx((1 + 2) * shard / 1e9)


def test_a_plan_by_turns_and_side_by_side():
    workload = workload_of(SMALL_BASE)
    alone = with_parallel(SMALL_BASE, world_size=4, tensor_model_parallel_size=4, offload=True)
    plans = [make_plan(SMALL_SHAPE, apart(alone, 4, lag), SMALL, workload) for lag in (0, 1)]
    turns, beside = plans
    generated, trained = turns.generation.seconds, turns.training.seconds
    assert turns.step_seconds == pytest.approx(generated + trained + turns.sync_seconds)
    assert turns.timeline.trainer_idle_seconds == pytest.approx(generated)
    loaded = beside.staging_seconds
    # A shard of 15.2 GB over PCIe, 46.72 GB/s.
    assert loaded == pytest.approx(15.2 / 46.72, rel=0.01) and turns.staging_seconds == 0
    slower = max(generated + loaded, trained)
    assert beside.step_seconds == pytest.approx(slower + beside.sync_seconds)
    tokens = workload.response_tokens / beside.step_seconds / 8
    assert beside.response_tokens_per_second == pytest.approx(tokens)


def ranked(fixed=Fixed(), cluster=SMALL, config=apart(SMALL_BASE, 1)):  # noqa: B008
    return rank_splits(SMALL_SHAPE, config, cluster, workload_of(SMALL_BASE), fixed)


@pytest.fixture(scope="module")
def searched():
    return ranked()


def test_the_best_split_is_the_best_of_all(searched):
    """Splits that a bound leaves out are planned here, and none is faster."""
    steps = [plan.step_seconds for plan in searched.plans]
    assert steps == sorted(steps)
    sampling = [plan.config.rollout.num_processes for plan in searched.plans]
    assert len(set(sampling)) == len(sampling) < 7
    every = {}
    for rollout_workers in range(1, 8):
        found = ranked(Fixed(samplers=rollout_workers))
        for plan in found.plans:
            p, r = plan.config.parallel, plan.config.rollout
            assert p.world_size + r.num_processes == 8 and r.num_processes == rollout_workers
            assert r.num_processes % r.tensor_model_parallel_size == 0
            assert find_misfit(SMALL_SHAPE, plan.config, SMALL, plan.memory) is None
        if found.plans:
            every[rollout_workers] = found.plans[0].step_seconds
    assert min(every.values()) == steps[0] and every[sampling[0]] == steps[0]
    assert len(every) > len(sampling)


def test_a_bound_is_below_what_it_bounds(searched):
    """Without it the search would be no faster: it leaves out what cannot win."""
    for plan in searched.plans:
        chosen = splits._RolloutWorkers(plan.config, plan.generation.seconds)
        assert splits._at_least(SMALL_SHAPE, chosen, SMALL, plan.workload) < plan.step_seconds


def test_whole_nodes_sample():
    nodes = dataclasses.replace(SMALL, gpus_per_node=2)
    assert splits._split_sizes(nodes, Fixed()) == [2, 4, 6]
    assert splits._split_sizes(SMALL, Fixed()) == [1, 2, 3, 4, 5, 6, 7]


def test_a_chosen_size_of_vllm_leaves_splits_out():
    fixed = Fixed(vllm_tp=4, tp=4, recompute="full", offload=True)
    found = ranked(fixed)
    assert [plan.config.rollout.num_processes for plan in found.plans] == [4]
    with pytest.raises(ConfigError, match="size=16 must divide rollout.num_processes=1 and"):
        ranked(fixed._replace(vllm_tp=16))


def test_the_samplers_share_is_theirs_alone():
    """A trainer that needs more than its GPU has does not keep vLLM's share from fitting."""
    config = apart(make_config(1, 1, 64, vllm_tp=8), 64)
    config, phases = with_largest_share(SHAPE_32B, config, 60 * 10**9, None)
    assert phases["actor_update"].total > phases["generation"].total
    assert 0.5 < config.rollout.gpu_memory_utilization < 0.9
    assert phases["generation"].total <= 60 * 10**9


def test_little_memory_says_which_side():
    little = dataclasses.replace(SMALL, gpu_bytes=20 * 10**9)
    found = ranked(Fixed(samplers=4), little)
    assert not found.plans
    name, closest = found.closest
    assert (
        name.startswith("4 rollout workers, TP ") and " on a trainer's GPU needs " in closest.reason
    )
    less = dataclasses.replace(SMALL, gpu_bytes=6 * 10**9)
    found = ranked(Fixed(samplers=4), less)
    assert "on a rollout worker's GPU" in found.misfits["4 rollout workers"].reason
    hosts = with_parallel(apart(SMALL_BASE, 1), host_memory_gb=10.0)
    found = ranked(Fixed(samplers=4), config=hosts)
    assert "a node of rollout workers needs" in found.misfits["4 rollout workers"].reason


def test_yaml_to_paste_has_the_split(searched, tmp_path):
    file = tmp_path / "plan.yaml"
    best = searched.plans[0].config
    file.write_text(to_paste(best))
    loaded = load_config(file)
    assert loaded.rollout == best.rollout and loaded.parallel == best.parallel


def test_what_a_lag_buys(searched):
    best = searched.plans[0]
    colocated = rank(SMALL_SHAPE, SMALL_BASE, SMALL, best.workload, Fixed()).plans[0]
    gain = colocated.step_seconds / best.step_seconds
    assert gain > 1
    assert describe_gain(best, colocated) == (
        f"lag 1 on 8 GPUs: {best.step_seconds:.0f} s a step, {gain:.2f} times as fast as the best "
        f"colocated plan, {colocated.step_seconds:.0f} s"
    )
    # The other way round.
    assert f", {gain:.2f} times as slow as" in describe_gain(colocated, best)
    assert describe_gain(best, None).endswith("; colocated, nothing fits with these options")


def test_a_dry_run_plans_both_sides():
    config = load_config(ONE_STEP_OFF, ["rollout.num_processes=32"])
    comment = dry_run_comment(config)
    assert "actor and critic, on 160 GPUs in 20 nodes\n" in comment and "\n# fits\n" in comment
    assert "#   128 GPUs train and 32 sample, lag 1: in a step the trainers wait " in comment
    assert "in each of 4 replicas\n" in comment
