"""Every layout computes what one process computes: losses, every gradient, norms and updates.

The reference for losses and gradients is transformers' Qwen2 in float64 on unpacked sequences; for
what follows (updates, their losses and norms) it is TP1 PP1 DP1 of the project itself.

Not exercised: NCCL and CUDA, bfloat16, Transformer Engine's layers, more than four ranks, more than
two ranks on one axis. (A float64 model of transformers still normalises and rotates in float32.)
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parallel.training import (
    ALL,
    LENGTHS,
    TEMPERATURE,
    Layout,
    actor_loss,
    critic_loss,
    make_batch,
    run_layout,
)
from tests.weights.tiny_hf import write_tiny_hf

TWO_MICRO_BATCHES = (((3, 0, 6), (1, 2, 4, 5)),)
UNEVEN = (((0, 1, 2, 3), (5,)), ((6,), (4,)))
# The second rank's second micro-batch has no response at all.
WITH_EMPTY = (((0, 1, 2, 3), (5, 4)), ((6,), ()))
FIVE = (((0, 1), (2,), (3, 4), (5,), (6,)),)

LAYOUTS = {
    "two micro-batches": Layout(split=TWO_MICRO_BATCHES),
    "one micro-batch a response": Layout(split=(tuple((i,) for i in ALL),)),
    "full recompute": Layout(recompute="full", split=TWO_MICRO_BATCHES),
    "TP2": Layout(tp=2, split=TWO_MICRO_BATCHES),
    "TP2 SP": Layout(tp=2, sp=True, split=TWO_MICRO_BATCHES),
    "PP2": Layout(pp=2, split=FIVE),
    "PP2 VPP2": Layout(pp=2, vpp=2, split=FIVE),
    "DP2": Layout(dp=2, split=UNEVEN),
    "DP2 overlap": Layout(dp=2, overlap=True, split=WITH_EMPTY),
    "DP2 distributed": Layout(dp=2, distributed=True, overlap=True, split=WITH_EMPTY),
    "TP2 PP2": Layout(tp=2, pp=2, split=TWO_MICRO_BATCHES),
    "TP2 PP2 SP distributed": Layout(tp=2, pp=2, sp=True, distributed=True, split=FIVE),
    "PP2 DP2": Layout(pp=2, dp=2, split=UNEVEN),
    "PP2 VPP2 DP2 distributed": Layout(
        pp=2, vpp=2, dp=2, distributed=True, overlap=True, split=WITH_EMPTY
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """HF directories; four layers, so that PP2 VPP2 has one a chunk."""
    root = tmp_path_factory.mktemp("layouts")
    sizes = dict(hidden=32, heads=4, kv_heads=2, ffn=48, vocab=60, num_layers=4)
    paths = {
        "actor": write_tiny_hf(root / "actor", **sizes),
        "tied actor": write_tiny_hf(root / "tied", tied=True, **sizes),
        "critic": write_tiny_hf(root / "critic", **sizes),
    }
    file = paths["critic"] / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    generator = torch.Generator().manual_seed(5)
    tensors["score.weight"] = torch.randn(1, 32, generator=generator) * 0.3
    save_file(tensors, file)
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def single(checkpoints, workers):
    """One process, all responses in one micro-batch."""
    return workers.run(1, run_layout, checkpoints, Layout())[0]


@pytest.fixture(scope="module")
def float64(checkpoints):
    """(loss, gradients by HF name, outputs) of transformers in float64, one sequence at a time."""
    return {name: _float64_reference(name, checkpoints) for name in checkpoints}


def _float64_reference(name, checkpoints):
    from transformers import Qwen2ForCausalLM

    base = checkpoints["actor" if name == "critic" else name]
    model = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager")
    batch = make_batch(model.config.vocab_size)
    parameters = dict(model.named_parameters())
    if name == "critic":
        del parameters["lm_head.weight"]
        tensors = load_file(checkpoints["critic"] + "/model.safetensors")
        parameters["score.weight"] = tensors["score.weight"].double().requires_grad_()
    outputs, start = [], 0
    for prompt, response in LENGTHS:
        tokens = batch.tokens[start : start + prompt + response]
        start += prompt + response
        hidden = model.model(tokens[None]).last_hidden_state[0, prompt - 1 : -1]
        if name == "critic":
            outputs.append(hidden @ parameters["score.weight"][0])
            continue
        logp = torch.log_softmax(model.lm_head(hidden) / TEMPERATURE, -1)
        picked = logp.gather(1, tokens[prompt:, None])[:, 0]
        outputs.append(torch.stack([picked, -(logp.exp() * logp).sum(-1)], -1))
    outputs = torch.cat(outputs)
    if name == "critic":
        loss = critic_loss(outputs, batch)
    else:
        loss = actor_loss(outputs[:, 0], outputs[:, 1], batch)
    loss.backward()
    gradients = {n: p.grad for n, p in parameters.items()}
    return loss.item(), gradients, outputs.detach()


def _assert_tensors_close(found, expected, tolerance):
    """Compare with the largest entry of each tensor as its scale."""
    assert set(found) == set(expected)
    for name, tensor in found.items():
        reference = expected[name].double()
        error = (tensor.double() - reference).abs().max() / reference.abs().max()
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


def _response_rows(parts):
    """Rows of [T] that belong to the responses of some micro-batches, in their order."""
    ends = torch.tensor([response for _, response in LENGTHS]).cumsum(0).tolist()
    return [t for part in parts for i in part for t in range(ends[i] - LENGTHS[i][1], ends[i])]


@pytest.mark.parametrize("name", ["actor", "critic", "tied actor"])
def test_one_process_equals_float64(name, single, float64):
    loss, gradients, outputs = float64[name]
    result = single[name]
    assert result.losses[0] == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(result.outputs.double(), outputs, rtol=1e-5, atol=1e-5)
    norm = sum(g.square().sum() for g in gradients.values()).sqrt().item()
    assert result.grad_norms[0] == pytest.approx(norm, rel=1e-5)
    _assert_tensors_close(result.gradients, gradients, 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout, checkpoints, workers, single):
    layout = LAYOUTS[layout]
    for rank, results in enumerate(workers.run(layout.world_size, run_layout, checkpoints, layout)):
        dp_rank = rank // layout.tp % layout.dp
        rows = _response_rows(layout.split[dp_rank])
        for name, result in results.items():
            one = single[name]
            torch.testing.assert_close(result.outputs, one.outputs[rows], rtol=1e-5, atol=1e-5)
            assert result.losses == pytest.approx(one.losses, rel=1e-5)
            assert result.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
            if not layout.distributed:
                _assert_tensors_close(result.gradients, one.gradients, 1e-5)
            _assert_tensors_close(result.weights, one.weights, 1e-5)
