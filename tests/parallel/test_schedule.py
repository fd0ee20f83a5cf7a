"""What forward_only and forward_backward promise, on one process and on a pipeline of two.

That layouts agree with each other and with float64 is in tests/distributed/test_matrix.py. Not
exercised: CUDA, where microbatches move to the device one at a time.
"""

import dataclasses

import pytest
import torch

from tests.cut import select
from tests.parallel.training import (
    ALL,
    LENGTHS,
    NUM_TOKENS,
    Layout,
    Trained,
    make_batch,
    make_config,
)
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.data.microbatch import make_microbatch
from vapo_megatron.models.build import transformer_config
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.optimizer import build_ddp
from vapo_megatron.parallel.schedule import forward_backward, forward_only

PP2 = Layout(pp=2, split=((ALL[:3], ALL[3:]),))
VIRTUAL = Layout(pp=2, vpp=2)


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("schedule")
    return str(write_tiny_hf(path, hidden=32, heads=2, kv_heads=2, ffn=48, vocab=60, num_layers=4))


def _start(hf_path, layout, **sections):
    config = make_config(layout, **sections)
    groups.initialize(config.parallel)
    return Trained(hf_path, layout, "actor", config)


def _one_process(hf_path):
    trained = _start(hf_path, Layout(split=((ALL[:3], (), ALL[3:]),)))
    chunks, microbatches = trained.chunks, trained.microbatches
    facts = {}
    sizes = []
    chunks[0].register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )

    outputs = forward_only(chunks, microbatches, trained.head)
    facts["lengths"] = [list(x.shape) for x in outputs]
    facts["smallest_forward_pass"] = min(sizes)
    facts["forward_only_has_graph"] = any(x.requires_grad for x in outputs)
    facts["no_microbatches"] = forward_only(chunks, [], trained.head)
    first = forward_only(chunks, microbatches[:1], trained.head)
    facts["order"] = torch.equal(first[0], outputs[0])

    def gradient(batches, loss=trained.loss):
        metrics = forward_backward(chunks, batches, loss)
        return metrics, torch.cat([p.main_grad.flatten().clone() for p in chunks[0].parameters()])

    facts["metrics"], whole = gradient(microbatches)
    facts["again"] = torch.equal(gradient(microbatches)[1], whole)
    # As after an update, when the optimizer has set .grad to main_grad.
    for p in chunks[0].parameters():
        p.grad = p.main_grad
    facts["after_an_update"] = torch.equal(gradient(microbatches)[1], whole)
    parts = [gradient([m])[1] for m in microbatches]
    facts["sum_error"] = float((sum(parts) - whole).abs().max() / whole.abs().max())
    facts["empty_gradient"] = float(parts[1].abs().max())
    facts["empty_loss"] = float(gradient(microbatches[1:2])[0]["loss"])

    def doubled(output, microbatch):
        loss, metrics = trained.loss(output, microbatch)
        return 2 * loss, metrics

    twice = gradient(microbatches, doubled)[1]
    facts["scale_error"] = float((twice - 2 * whole).abs().max() / whole.abs().max())
    buffer = chunks[0].buffers[0]
    buffer.gradient_scaling_factor = 0.5
    with pytest.raises(AssertionError, match="gradients would be scaled"):
        gradient(microbatches)
    return facts


def test_one_process(hf_path, workers):
    (facts,) = workers.run(1, _one_process, hf_path)
    sizes = [sum(response for _, response in part) for part in (LENGTHS[:3], (), LENGTHS[3:])]
    assert facts["lengths"] == [[size, 2] for size in sizes]
    assert facts["smallest_forward_pass"] == 1  # the empty one has a token of padding
    assert not facts["forward_only_has_graph"]
    assert facts["no_microbatches"] == []
    assert facts["order"]
    assert int(facts["metrics"]["tokens"]) == NUM_TOKENS - 3
    assert not facts["metrics"]["loss"].requires_grad
    assert facts["again"], "gradients of an earlier call were left in the buffers"
    assert facts["after_an_update"], "the optimizer's .grad was added to"
    assert facts["sum_error"] < 1e-6
    assert facts["empty_gradient"] == 0 and facts["empty_loss"] == 0
    assert facts["scale_error"] < 1e-6


def _pipeline(hf_path, layout, batched=None):
    trained = _start(hf_path, layout, parallel={"batch_p2p_comm": batched})
    last = trained.ranks.is_last_stage
    seen = []

    def head(output, microbatch):
        assert last, "head runs on the last stage"
        seen.append(output.requires_grad)
        return trained.head(output, microbatch)

    outputs = forward_only(trained.chunks, trained.microbatches, head)
    values = forward_only(trained.chunks, trained.microbatches, lambda o, m: head(o, m)[:, 0])
    metrics = forward_backward(trained.chunks, trained.microbatches, trained.loss)
    kept = [chunk.module.decoder.input_tensor for chunk in trained.chunks]
    assert kept == [None] * len(kept), "an input outlives its pass, and so does its gradient"
    return outputs, values, {k: float(v) for k, v in metrics.items()}, seen


@pytest.mark.parametrize(
    ("layout", "batched"), [(PP2, None), (PP2, False), (VIRTUAL, None), (VIRTUAL, False)]
)
def test_every_stage_gets_the_results(layout, batched, hf_path, workers):
    (expected,) = workers.run(1, _pipeline, hf_path, Layout(split=layout.split))
    ranks = workers.run(2, _pipeline, hf_path, layout, batched)
    assert not ranks[0][3]
    assert not any(ranks[1][3])
    for outputs, values, metrics, _ in ranks:
        for found, reference in zip([*outputs, *values], [*expected[0], *expected[1]], strict=True):
            torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-5)
        assert metrics == pytest.approx(expected[2], rel=1e-5)
    assert torch.equal(torch.cat(ranks[0][0]), torch.cat(ranks[1][0]))


def _four_microbatches(hf_path, layout, batched):
    """Loss of four microbatches of 16 tokens: wrong sends would have the right size."""
    trained = _start(hf_path, layout, parallel={"batch_p2p_comm": batched})
    batch = make_batch(trained.shape.vocab_size)
    parts = ((0, 2), (5, 6), (3,), (1, 4))  # 8 + 7, 8 + 7, 16, 11 + 5 tokens
    microbatches = [make_microbatch(select(batch, part), multiple_of=16) for part in parts]
    return float(forward_backward(trained.chunks, microbatches, trained.loss)["loss"])


def test_batched_sends_of_virtual_stages_are_wrong(hf_path, workers):
    """Why load_config refuses them, which `make_config` here does not."""
    (expected,) = workers.run(1, _four_microbatches, hf_path, Layout(), None)
    right = workers.run(2, _four_microbatches, hf_path, VIRTUAL, None)
    wrong = workers.run(2, _four_microbatches, hf_path, VIRTUAL, True)
    assert right == pytest.approx([expected] * 2, rel=1e-5)
    assert all(abs(loss / expected - 1) > 0.05 for loss in wrong)


def _without_per_token_loss(hf_path):
    config = make_config(Layout())
    trained = _start(hf_path, Layout())
    settings = transformer_config(trained.shape, config.model, config.parallel)
    settings = dataclasses.replace(settings, calculate_per_token_loss=False)
    with pytest.raises(AssertionError, match="set calculate_per_token_loss before DDP"):
        build_ddp(trained.model, config.parallel, settings)


def test_averaging_over_data_parallel_ranks_is_refused(hf_path, workers):
    workers.run(1, _without_per_token_loss, hf_path)
