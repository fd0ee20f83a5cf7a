"""The smoke test's sections that need vLLM, Transformer Engine or several processes, on a CPU.

Each as the tool runs it, at its small sizes, and then with a mistake that it must see. Not
exercised: sleep and CUDA graphs (a CPU has neither; the sleeping weights are spoilt instead),
Transformer Engine itself (its comparison is run with the local layers in its place), NCCL, and the
plan's bytes beside a GPU's.
"""

import os

import pytest
import torch
import torch.distributed as dist

from tools.smoke import nccl, step, te
from tools.smoke.models import make_config, start_groups
from tools.smoke.parity import reference as write_reference
from tools.smoke.report import Row
from tools.smoke.sizes import SMALL
from vapo_megatron.planning.memory import PhaseMemory


def failed(rows):
    return [row.case for row in rows if not row.passed]


@pytest.fixture(scope="module")
def reference(workers, tmp_path_factory):
    """Weights, and what one process makes of them."""
    directory = tmp_path_factory.mktemp("reference")
    workers.run(1, write_reference, SMALL, directory)
    return directory


# --- te ---


def test_te_says_why_it_was_skipped(workers, monkeypatch):
    ((row,),) = workers.run(1, te.transformer_engine, SMALL, None)
    assert row.verdict == "skipped" and row.section == "te"
    assert "not installed" in row.measured or "needs a GPU" in row.measured


def _te_updates(directory, scale):
    """Local layers in the place of Transformer Engine's, with an attention that is off by scale."""
    from vapo_megatron.models.attention import PackedAttention

    honest, updated = PackedAttention.forward, te._updated

    def off(self, *arguments, **named):
        return scale * honest(self, *arguments, **named)

    def compared(*arguments, like=None):
        PackedAttention.forward = honest if like is None else off
        return updated(*arguments, like=like)

    te._updated = compared
    try:
        return te.updates(SMALL, directory, "local", "local")
    finally:
        PackedAttention.forward, te._updated = honest, updated


def test_te_compares_updates(workers, reference):
    (rows,) = workers.run(1, _te_updates, reference, 1.0)
    cases = [row.case for row in rows]
    assert cases[0] == "actor, local against local, forward" and len(cases) == 6
    assert "update by torch's Adam" in cases[2]
    assert failed(rows) == [] and rows[0].figures["error"] == 0
    (rows,) = workers.run(1, _te_updates, reference, 1.5)
    assert set(cases[:2] + cases[3:5]) <= set(failed(rows))


def _te_attention(scale):
    from tools.smoke import attention

    case = SMALL.attention[0]
    layer = attention._layer(case, "bfloat16")
    return te.packed_attention(case, lambda *qkv, **packed: scale * layer(*qkv, **packed))


def test_te_compares_attention(workers):
    assert workers.run(1, _te_attention, 1.0)[0].passed
    assert not workers.run(1, _te_attention, 1.1)[0].passed


# --- nccl ---


def test_layouts_of_a_node():
    assert [nccl.title(layout) for layout in nccl.layouts(2)] == [
        "TP 2 PP 1 DP 1", "TP 1 PP 2 DP 1",
    ]  # fmt: skip
    assert [nccl.title(layout) for layout in nccl.layouts(8)] == [
        "TP 2 PP 1 DP 4", "TP 1 PP 2 DP 4", "TP 2 PP 2 DP 2",
    ]  # fmt: skip


def _nccl(directory):
    dist.destroy_process_group()  # the tool starts torch.distributed itself
    rows = list(nccl.nccl(SMALL, directory))
    return rows, len(os.listdir("/proc/self/task"))


def test_nccl_needs_two(workers):
    (((row,), _),) = workers.run(1, _nccl, None)
    assert (row.verdict, row.measured) == ("skipped", "there is one GPU; this needs two")


@pytest.mark.slow
def test_nccl(vllm_workers, reference):
    found = vllm_workers.run(2, _nccl, reference, timeout_seconds=280)
    (rows, num_threads), (of_rank_1, _) = found
    assert of_rank_1 == [], "rank 0 has the rows"
    assert num_threads < 400, "the groups of former layouts are left"
    assert failed(rows) == []
    assert rows[0] == Row("nccl", "gloo, collectives of 2 ranks", "exact", "exact")
    # Two layouts, two dtypes, two roles, three rows each; two layouts into vLLM's TP 1 and TP 2.
    assert len(rows) == 2 + 2 * 2 * 2 * 3 + 2 * 2
    assert all(row.figures["error"] > 0 for row in rows[2:])
    assert rows[-1].case.endswith("sync of TP 1 PP 2 DP 1 to 1 x TP 2")


def _one_rank_is_wrong():
    """The collectives where rank 1 gets nothing from a reduce-scatter."""
    honest = dist.reduce_scatter_tensor
    if dist.get_rank() == 1:
        dist.reduce_scatter_tensor = lambda output, *rest, **named: honest(
            output.clone(), *rest, **named
        )
    try:
        return next(nccl.communication(8))
    finally:
        dist.reduce_scatter_tensor = honest


def test_nccl_sees_a_collective_that_is_wrong_on_another_rank(workers):
    row, _ = workers.run(2, _one_rank_is_wrong)
    assert row.measured == "wrong: reduce-scatter bfloat16, reduce-scatter float32"
    assert not row.passed


def _updates_with_partial_gradients(directory):
    """A layout's update where gradients that ranks have in parts are not added up."""
    from vapo_megatron.parallel import optimizer

    def only_data_parallel(chunks, *_, **__):
        for chunk in chunks:
            chunk.finish_grad_sync()

    honest = optimizer._finalize
    optimizer._finalize = only_data_parallel
    try:
        layout = nccl.layouts(2)[0]
        ranks = start_groups(make_config("float32", parallel=layout))
        return nccl.update(SMALL, directory, "actor", "float32", layout, ranks)
    finally:
        optimizer._finalize = honest


def test_nccl_sees_partial_gradients(workers, reference):
    for rows in workers.run(2, _updates_with_partial_gradients, reference):
        assert failed(rows) == [
            "TP 2 PP 1 DP 1, actor float32, backward",
            "TP 2 PP 1 DP 1, actor float32, update, gradient norm",
        ]


# --- sampler ---


def _sampler(directory, mistake):
    from tools.smoke import sampler
    from vapo_megatron.weights.reshard import sync

    execute, differences = sync.execute, sync.differences
    calls = []

    def only_once(*arguments):
        calls.append(arguments)
        return execute(*arguments) if len(calls) == 1 else 0

    if mistake:
        # Nor does the checksum's comparison see it, which would end the section.
        sync.execute, sync.differences = only_once, lambda *_: []
    try:
        return list(sampler.sampler(SMALL, directory))
    finally:
        sync.execute, sync.differences = execute, differences


@pytest.mark.slow
def test_sampler(vllm_workers, tmp_path):
    (rows,) = vllm_workers.run(1, _sampler, tmp_path, False, timeout_seconds=280)
    assert failed(rows) == []
    assert [row.case for row in rows] == [
        "vLLM starts",
        "sleep level 2",
        "generate twice, awake",
        "log-probabilities against the trainer's, first weights",
        "generate, sleep level 2, wake, sync, generate",
        "log-probabilities against the trainer's, other weights",
    ]
    assert rows[4].figures == {"same_share": 1.0, "wanted_share": 1.0}
    # bfloat16 on both sides, with other kernels: not the same bits, or nothing was compared.
    assert rows[3].figures["error"] > 0
    assert rows[1].figures["weight_bytes"] > 0


@pytest.mark.slow
def test_sampler_sees_weights_that_do_not_come_back(vllm_workers, tmp_path):
    (rows,) = vllm_workers.run(1, _sampler, tmp_path, True, timeout_seconds=280)
    assert failed(rows) == [
        "generate, sleep level 2, wake, sync, generate",
        "log-probabilities against the trainer's, other weights",
    ]


# --- step ---


def _step(directory):
    dist.destroy_process_group()
    return list(step.step(SMALL, directory))


def test_step(vllm_workers, tmp_path):
    (rows,) = vllm_workers.run(1, _step, tmp_path, timeout_seconds=280)
    assert failed(rows) == []
    assert [row.case for row in rows] == [
        "actor's updates, step 1", "critic's updates, step 1",
        "log-probabilities of vLLM and the trainer, step 1", "whole step 1",
        "generation", "values", "logprobs", "critic_update", "actor_update", "sync",
    ]  # fmt: skip
    assert all(row.figures["peak_bytes"] > 0 for row in rows[4:])


def test_peaks_above_the_plan_fail():
    planned = {"values": PhaseMemory(activations=90, reserve=10), "sync": PhaseMemory(reserve=100)}
    steps = [{"memory/values_peak_bytes": 106.0, "memory/sync_peak_bytes": 105.0}]
    steps.append({"memory/values_peak_bytes": 50.0, "memory/sync_peak_bytes": 50.0})
    for of_step in steps:
        of_step.update({"time/values_seconds": 1.0, "time/sync_seconds": 2.0})
    rows = {row.case: row for row in step.peaks(steps, planned)}
    assert not rows["values"].passed and rows["sync"].passed
    assert rows["values"].figures == {"peak_bytes": 106, "seconds": 1, "planned_bytes": 100}
    assert all(row.passed for row in step.peaks(steps, None))


@pytest.mark.parametrize("norm,skips", [(None, 0), (0.0, 0), (1.0, 1)])
def test_a_step_without_an_update_fails(tmp_path, norm, skips):
    config = step.step_config(SMALL.step, tmp_path)
    of_step = {"rollout/logprob_diff_mean": None, "tokens_per_second": 1.0}
    of_step.update({"time/step_seconds": 1.0, "rollout/response_length_mean": 1.0})
    for role in ("actor", "critic"):
        of_step.update({f"{role}/grad_norm": norm, f"{role}/skipped_updates": skips})
    rows = list(step.learned(config, SMALL.step, [of_step]))
    assert [row.passed for row in rows] == [False, False, False, True]


def test_random_models_are_the_same_for_vllm_and_the_trainer(tmp_path):
    """config.json says what the weights have."""
    from tools.smoke.models import write_random_hf
    from vapo_megatron.models.hf_config import read_model_shape

    write_random_hf(tmp_path, SMALL.sampler.shape, "actor", seed=0, dtype=torch.bfloat16)
    assert read_model_shape(tmp_path) == SMALL.sampler.shape
