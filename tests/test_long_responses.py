"""Responses of 16,384 tokens over context-parallel ranks: less memory on each, the same gradients.

    bash tests/run.sh tests/test_long_responses.py -m slow -s

Does not exercise a GPU or Transformer Engine's attention.
"""

import pytest
import torch

from tests.weights.tiny_hf import write_tiny_hf

LENGTH, PROMPT, VOCAB = 16_384, 64, 61
MODEL = dict(num_layers=2, hidden=128, heads=4, kv_heads=2, ffn=256, vocab=VOCAB)
LARGEST_PART = {2: 0.6, 4: 0.4}
"""Of the memory of one process; parameters and their gradients are not divided."""


def trained(hf, cp_size):
    """(peak bytes of a forward and backward pass, gradients by HF name); a worker's function."""
    from tests.planning.measured import Allocations, _response
    from vapo_megatron.config import VapoConfig
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.minibatches import cut_of, make_microbatches, make_mini_batches
    from vapo_megatron.roles.actor import Actor
    from vapo_megatron.weights.gather import full_gradients

    parallel = {"world_size": cp_size, "context_parallel_size": cp_size}
    config = VapoConfig.model_validate(
        {"model": {"hf_path": str(hf), "dtype": "float32"}, "parallel": parallel}
    )
    here = groups.initialize(config.parallel)
    shape = read_model_shape(hf)
    actor = Actor(shape, config, here, str(hf))
    torch.manual_seed(7)
    batch = _response(LENGTH + PROMPT, VOCAB)
    size = batch.rollout_logprobs.numel()
    batch = batch.replace(old_logprobs=torch.full((size,), -4.0), advantages=torch.randn(size))
    microbatches = make_microbatches(batch, [1], **cut_of(config.parallel, None, here))
    (mini_batch,) = make_mini_batches(microbatches, [1], here)
    with Allocations() as allocated:
        actor.compute_gradients(mini_batch)
    named = full_gradients(actor.trained.chunks, shape, here, "actor")
    return allocated.peak, {name: gradient.clone() for name, gradient in named}


@pytest.mark.slow
def test_ranks_share_a_long_responses_memory(workers, tmp_path):
    hf = write_tiny_hf(tmp_path, **MODEL)
    ((alone, expected),) = workers.run(1, trained, hf, 1)
    for cp_size, most in LARGEST_PART.items():
        ranks = workers.run(cp_size, trained, hf, cp_size)
        peak = max(found for found, _ in ranks)
        errors = {
            name: float((gradient - expected[name]).norm() / expected[name].norm())
            for _, gradients in ranks
            for name, gradient in gradients.items()
        }
        worst = max(errors, key=errors.__getitem__)
        print(
            f"CP {cp_size}: {peak / 1e6:.0f} MB on a rank, {peak / alone:.2f} of {alone / 1e6:.0f} "
            f"MB in one process; largest difference of a gradient {errors[worst]:.1e} ({worst})"
        )
        assert peak < most * alone and errors[worst] < 1e-5
