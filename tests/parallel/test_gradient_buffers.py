"""Dense and expert gradient buffers: of stand-in chunks, and of DDP around a layer marked expert.

Does not exercise: a mixture of experts, whose experts other ranks hold.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.parallel.training import Layout, make_config


def _chunk(dense, expert):
    """As far as gradient_buffers reads it: one float in each buffer."""
    buffers, experts = (
        [SimpleNamespace(grad_data=torch.tensor([value])) for value in values]
        for values in (dense, expert)
    )
    return SimpleNamespace(buffers=buffers, expert_parallel_buffers=experts)


def test_both_kinds_are_yielded_chunk_by_chunk():
    from vapo_megatron.parallel.gradient_buffers import gradient_buffers

    chunks = [_chunk([1.0, 2.0], [3.0]), _chunk([], [4.0]), _chunk([5.0], [])]
    assert [float(b.grad_data) for b in gradient_buffers(chunks)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_experts_gradient_that_is_not_finite_is_seen(value):
    from vapo_megatron.parallel.gradient_buffers import (
        fill_gradients_with_nan,
        gradients_are_finite,
    )

    assert gradients_are_finite([_chunk([1.0], [2.0])])
    assert not gradients_are_finite([_chunk([value], [2.0])])
    assert not gradients_are_finite([_chunk([1.0], [value])])
    chunk = _chunk([1.0], [2.0])
    fill_gradients_with_nan([chunk])
    assert all(b.grad_data.isnan().all() for b in [*chunk.buffers, *chunk.expert_parallel_buffers])


def _of_two_layers():
    """What DDP makes of a dense layer and of one marked as expert, on 2 data-parallel ranks."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from vapo_megatron.parallel import groups, schedule
    from vapo_megatron.parallel.gradient_buffers import complete_gradients, gradient_buffers
    from vapo_megatron.parallel.optimizer import build_ddp

    config = make_config(Layout(dp=2, distributed=True))
    ranks = groups.initialize(config.parallel)
    settings = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, calculate_per_token_loss=True
    )
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    layers[0].weight.data.copy_(torch.eye(64))
    layers[1].weight.data.fill_(1.0)
    layers[1].weight.allreduce = False  # as megatron-core marks experts
    chunks = build_ddp([layers], config.parallel, settings)
    (dense, expert) = gradient_buffers(chunks)
    assert [dense] == chunks[0].buffers and [expert] == chunks[0].expert_parallel_buffers
    chunks[0](torch.full((1, 64), ranks.dp_rank + 1.0)).sum().backward()
    chunks[0].finish_grad_sync()
    complete_gradients(chunks)
    gradients = [layer.weight.main_grad.unique().tolist() for layer in layers]
    schedule._assert_nothing_divides(chunks)
    expert.gradient_scaling_factor = 0.5
    with pytest.raises(AssertionError, match="gradients would be scaled"):
        schedule._assert_nothing_divides(chunks)
    return gradients


def test_ddp_keeps_experts_apart(workers):
    # Inputs are 1 on one rank and 2 on the other: 1 + 2 = 3, and 64 times that through ones.
    for gradients in workers.run(2, _of_two_layers):
        assert gradients == [[64 * 3.0], [3.0]]
