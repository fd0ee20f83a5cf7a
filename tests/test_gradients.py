"""Full gradients in any layout, their files and the comparison of two layouts.

Gradients of every layout against one process are tests/distributed's subject. Not exercised: NCCL.
"""

import pytest
import torch

from tests.parallel.training import Layout, Trained, make_config
from tests.weights.tiny_hf import write_tiny_hf

SMALL = dict(num_layers=2, hidden=32, heads=2, kv_heads=2, ffn=48, vocab=60)
TWO_RANKS = (((0, 1, 2, 3), (5,)), ((6,), (4,)))


def _gradients(hf_path, layout, sections, bucket_bytes):
    """Gradients of the first update, the parameters before and after, and the update's norm."""
    from vapo_megatron.gradients import full_gradients
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.optimizer import optimizer_step

    config = make_config(layout, **sections)
    place = groups.initialize(config.parallel)
    trained = Trained(hf_path, layout, "actor", config)
    trained.forward_backward()
    before = [p.detach().clone() for p in trained.model[0].parameters()]
    named = full_gradients(trained.chunks, trained.shape, place, "actor", bucket_bytes=bucket_bytes)
    gradients = {name: g.clone() for name, g in named}
    after = [p.detach().clone() for p in trained.model[0].parameters()]
    assert all(map(torch.equal, before, after)), "gathering must leave the parameters alone"
    assert [p.dtype for p in before] == [p.dtype for p in after]
    return gradients, float(optimizer_step(trained.optimizer)), trained.full_tensors()


@pytest.mark.parametrize("tied,dtype", [(True, "float32"), (False, "bfloat16")])
def test_the_distributed_optimizer_changes_no_gradient(workers, tmp_path, tied, dtype):
    hf = str(write_tiny_hf(tmp_path, tied=tied, **SMALL))
    sections = {"model": {"dtype": dtype}}
    plain = Layout(dp=2, split=TWO_RANKS)
    expected, norm, weights = workers.run(2, _gradients, hf, plain, sections, 1 << 30)[0]
    assert "lm_head.weight" not in expected or not tied
    total = sum(g.double().square().sum() for g in expected.values()).sqrt()
    assert norm == pytest.approx(float(total), rel=1e-6)
    for overlap in (False, True):
        layout = plain._replace(distributed=True, overlap=overlap)
        for found in workers.run(2, _gradients, hf, layout, sections, 4000):
            gradients, same_norm, same_weights = found
            assert set(gradients) == set(expected)
            for name, gradient in gradients.items():
                assert gradient.dtype == torch.float32
                torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0, msg=name)
            assert same_norm == pytest.approx(norm, rel=1e-6)
            torch.testing.assert_close(same_weights, weights)


def test_gradients_of_shards_and_stages(workers, tmp_path):
    hf = str(write_tiny_hf(tmp_path, tied=True, **SMALL))
    expected, *_ = workers.run(1, _gradients, hf, Layout(), {}, 1 << 30)[0]
    for layout in (Layout(tp=2, sp=True), Layout(pp=2)):
        for gradients, *_ in workers.run(layout.world_size, _gradients, hf, layout, {}, 4000):
            assert set(gradients) == set(expected)
            for name, gradient in gradients.items():
                error = (gradient - expected[name]).norm() / expected[name].norm()
                assert error < 1e-5, f"{layout}: {name} differs by {error:.2e}"
