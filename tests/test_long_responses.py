"""A model learns from a response of 16,384 tokens in less memory on each context-parallel rank.

    bash tests/run.sh tests/test_long_responses.py -m slow -s

Does not exercise a GPU or Transformer Engine's attention.
"""

import pytest
import torch

from tests.weights.tiny_hf import write_tiny_hf

LENGTH, PROMPT, VOCAB = 16_384, 64, 61
MODEL = dict(num_layers=2, hidden=128, heads=4, kv_heads=2, ffn=256, vocab=VOCAB)
LARGEST_PART = {2: 0.6, 4: 0.4}
"""Of the memory of one process; parameters, gradients and (here) Adam's state are not divided."""


def trained(hf, cp_size):
    """A worker's function: peak bytes of two updates, what they gained, the first's gradients.

    Gained: the advantages times what the response tokens' log-probabilities rose by since the
    start, after each update. Gradients are by HF name.
    """
    from tests.planning.measured import Allocations, _response
    from vapo_megatron.config import VapoConfig
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.models.partition import microbatch_options
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.minibatches import filled_in, make_microbatches, make_mini_batches
    from vapo_megatron.roles.actor import Actor
    from vapo_megatron.roles.advantages import with_positive_examples
    from vapo_megatron.weights.gather import full_gradients

    parallel = {"world_size": cp_size, "context_parallel_size": cp_size}
    config = VapoConfig.model_validate(
        {
            "model": {"hf_path": str(hf), "dtype": "float32"},
            "optimizer": {"actor_learning_rate": 1e-3, "actor_warmup_updates": 0},
            "parallel": parallel,
        }
    )
    here = groups.initialize(config.parallel)
    shape = read_model_shape(hf)
    actor = Actor(shape, config, here, str(hf))
    torch.manual_seed(7)
    batch = _response(LENGTH + PROMPT, VOCAB)
    microbatches = make_microbatches(
        batch, [1], **microbatch_options(config.model, config.parallel, here)
    )
    advantages = torch.randn(batch.rollout_logprobs.shape)
    peaks, old = [], [actor.compute_logprobs(microbatches)[0]]
    for step in range(2):
        known = with_positive_examples(batch, config.algorithm)
        known = known.replace(old_logprobs=old[-1], advantages=advantages)
        mini_batches = make_mini_batches(filled_in(microbatches, known), [1], here)
        with Allocations() as allocated:
            actor.update(list(mini_batches))
        peaks.append(allocated.peak)
        old.append(actor.compute_logprobs(microbatches)[0])
        if step == 0:
            named = full_gradients(actor.placed.chunks, shape, here, "actor")
            gradients = {name: gradient.clone() for name, gradient in named}
    return max(peaks), [float((advantages * (new - old[0])).sum()) for new in old[1:]], gradients


@pytest.mark.slow
def test_ranks_share_a_long_responses_memory(workers, tmp_path):
    hf = write_tiny_hf(tmp_path, **MODEL)
    ((alone, gained, expected),) = workers.run(1, trained, hf, 1)
    assert 0 < gained[0] < gained[1], "it does not learn"
    for cp_size, most in LARGEST_PART.items():
        ranks = workers.run(cp_size, trained, hf, cp_size)
        peak = max(found for found, _, _ in ranks)
        errors = {
            name: float((gradient - expected[name]).norm() / expected[name].norm())
            for _, _, gradients in ranks
            for name, gradient in gradients.items()
        }
        worst = max(errors, key=errors.__getitem__)
        print(
            f"CP {cp_size}: {peak / 1e6:.0f} MB on a rank, {peak / alone:.2f} of {alone / 1e6:.0f} "
            f"MB in one process; largest difference of a gradient {errors[worst]:.1e} ({worst}); "
            f"gained {ranks[0][1]}, in one process {gained}"
        )
        assert peak < most * alone and errors[worst] < 1e-5
        assert all(found == pytest.approx(gained, rel=1e-3) for _, found, _ in ranks)
