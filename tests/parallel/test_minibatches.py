"""Padding of packed forward passes; the rest is in tests/roles/test_roles.py."""

import pytest

from tests.data.test_batch import make_batch
from vapo_megatron.config import VapoConfig
from vapo_megatron.parallel.minibatches import make_microbatches, packed_multiple


@pytest.mark.parametrize(
    ("tp_size", "sequence_parallel", "fp8", "multiple"),
    [(4, False, None, 1), (4, True, None, 4), (4, False, "hybrid", 16), (4, True, "e4m3", 64)],
)
def test_padding(tp_size, sequence_parallel, fp8, multiple):
    """FP8 asks for 16 tokens on each rank; sequence parallelism gives it a TP-th of them."""
    config = VapoConfig.model_validate(
        {
            "model": {"fp8": fp8},
            "parallel": {
                "world_size": tp_size,
                "tensor_model_parallel_size": tp_size,
                "sequence_parallel": sequence_parallel,
            },
        }
    )
    assert packed_multiple(config.parallel, config.model.fp8) == multiple
    batch = make_batch()
    plan = [[0], list(range(1, batch.num_responses)), []]
    for micro, part in zip(
        make_microbatches(batch, map(len, plan), multiple_of=multiple), plan, strict=True
    ):
        size = int(batch.sequence_lengths[part].sum())
        padded = max(-(-size // multiple), 1) * multiple
        assert micro.tokens.numel() == int(micro.model_cu_seqlens[-1]) == padded
