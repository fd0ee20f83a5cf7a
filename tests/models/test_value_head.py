"""The critic's head: its values, its precision, and its gradient on every tensor-parallel rank.

Does not exercise its checkpoints (tests/parallel does) nor a pipeline (tests/distributed does).
"""

import torch

from tests.models.built import Layout, build, call, write_hf
from vapo_megatron.models.value_head import values_of
from vapo_megatron.weights.load_hf import load_hf_weights

LENGTHS = (7, 2, 11)
STD = 0.3


def token_ids():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(300, (n,), generator=generator) for n in LENGTHS]


def targets():
    return torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(5))


def critic(hf_path, layout, **model):
    built = build(hf_path, layout, "critic", **model)
    load_hf_weights(built.chunks, built.shape, hf_path, built.ranks, "critic")
    return built


def values_and_gradient(hf_path, layout, marked=True):
    """Return values [S] and, as the optimizer would see it, the gradient of the head's weight."""
    from vapo_megatron.parallel.optimizer import build_ddp

    model = critic(hf_path, layout, value_head_init_std=STD)
    (chunk,) = model.chunks
    head = chunk.output_layer
    if not marked:
        head.weight.sequence_parallel = False
    (wrapped,) = build_ddp(model.chunks, model.config.parallel, chunk.config)
    values = values_of(call(wrapped, token_ids()))
    (values * targets()).sum().backward()
    chunk.config.finalize_model_grads_func([wrapped])
    return values.detach(), head.weight.main_grad.clone(), head.weight.detach().clone()


def test_values_equal_transformers(tmp_path, workers):
    from transformers import Qwen2ForTokenClassification  # Not at the top: workers do not need it.

    hf_path = write_hf(tmp_path)
    ((values, gradient, weight),) = workers.run(1, values_and_gradient, hf_path, Layout())
    model = Qwen2ForTokenClassification.from_pretrained(
        hf_path, num_labels=1, dtype=torch.float32
    ).eval()
    model.score.weight.data.copy_(weight)
    model.score.bias.data.zero_()
    theirs = torch.cat([model(ids[None]).logits[0, :, 0] for ids in token_ids()])
    assert values.dtype is torch.float32 and values.shape == (20,)
    assert (values - theirs).abs().max() <= 2e-6 * theirs.abs().max()
    (theirs * targets()).sum().backward()
    expected = model.score.weight.grad
    assert (gradient - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_every_rank_has_the_same_values_and_gradient(tmp_path, workers):
    hf_path = write_hf(tmp_path)
    ((values, gradient, _),) = workers.run(1, values_and_gradient, hf_path, Layout())
    for layout in (Layout(tp=2), Layout(tp=2, sp=True)):
        results = workers.run(2, values_and_gradient, hf_path, layout)
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        for ours, ours_gradient, _ in results:
            assert (ours - values).abs().max() < 1e-5
            assert (ours_gradient - gradient).abs().max() < 1e-5 * gradient.abs().max()


def test_without_the_mark_replicas_would_drift_apart(tmp_path, workers):
    """Under sequence parallelism each rank sees half of the tokens: the halves must be summed."""
    hf_path = write_hf(tmp_path)
    layout = Layout(tp=2, sp=True)
    marked = workers.run(2, values_and_gradient, hf_path, layout)
    unmarked = workers.run(2, values_and_gradient, hf_path, layout, False)
    assert not torch.allclose(unmarked[0][1], unmarked[1][1], rtol=0.1)
    assert torch.allclose(unmarked[0][1] + unmarked[1][1], marked[0][1], atol=1e-6)


def initial_values(hf_path):
    (chunk,) = critic(hf_path, Layout()).chunks
    with torch.no_grad():
        return values_of(call(chunk, token_ids()))


def test_starts_at_zero_by_default(tmp_path, workers):
    (values,) = workers.run(1, initial_values, write_hf(tmp_path))
    assert values.shape == (20,) and not values.any()
