"""The reference policy: the actor before its first update, and no more than its parameters.

Its turns and host memory are in tests/roles/test_device_schedule.py; the KL's gradient in every
layout in tests/distributed. Not exercised: its checkpoint, for it has none.
"""

import pytest
import torch

from tests.cut import mini_batches
from tests.dumped import MODEL
from tests.roles.test_roles import batch
from tests.weights.tiny_hf import write_tiny_hf


def drift(hf, parallel):
    """(actor's log-probabilities, reference's, KL and gradient of it before, and after updates)."""
    from vapo_megatron.config import VapoConfig
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.minibatches import make_microbatches
    from vapo_megatron.roles.actor import Actor, Reference
    from vapo_megatron.weights.gather import full_gradients

    config = VapoConfig.model_validate(
        {
            "model": {"hf_path": str(hf), "dtype": "float32"},
            "parallel": parallel,
            "rollout": {"temperature": 0.7},
            "algorithm": {"kl_coef": 0.5, "positive_lm_coef": 0.0},
            "optimizer": {"actor_learning_rate": 1e-2, "actor_warmup_updates": 0},
        }
    )
    place, shape = groups.initialize(config.parallel), read_model_shape(hf)
    actor = Actor(shape, config, place, config.model.hf_path)
    reference = Reference(shape, config, place)
    plan = [[0, 1], [2, 3]]

    def measured():
        """KL and the norm of its gradient, where the policy loss has none."""
        found = batch(actor.compute_logprobs(microbatches)[0])
        found = found.replace(reference_logprobs=frozen, advantages=torch.zeros_like(frozen))
        (mini_batch,) = mini_batches(found, [plan], place)
        metrics = actor.compute_gradients(mini_batch)
        gradients = full_gradients(actor.placed.chunks, shape, place, "actor")
        return float(metrics["reference_kl"]), sum(float(g.abs().sum()) for _, g in gradients)

    microbatches = make_microbatches(batch(), map(len, plan), multiple_of=1)
    logprobs, _ = actor.compute_logprobs(microbatches)
    frozen = reference.compute_logprobs(microbatches)
    before = measured()
    learning = batch(logprobs).replace(reference_logprobs=frozen)
    actor.update(mini_batches(learning, [plan], place))
    after = measured()
    assert torch.equal(reference.compute_logprobs(microbatches), frozen), "it stands still"
    for parameter in reference.placed.model[0].parameters():
        assert not parameter.requires_grad and not hasattr(parameter, "main_grad")
    return logprobs, frozen, before, after


@pytest.fixture(scope="module")
def alone(workers, tmp_path_factory):
    hf = write_tiny_hf(tmp_path_factory.mktemp("reference"), **MODEL)
    return hf, workers.run(1, drift, hf, {})[0]


def test_the_kl_grows_from_zero(alone):
    logprobs, frozen, before, after = alone[1]
    assert torch.equal(frozen, logprobs)
    assert before == (0.0, 0.0)
    assert after[0] > 1e-3 and after[1] > 1e-3


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_ranks_that_share_a_model_have_the_same_reference(workers, alone, axis):
    hf, (_, expected, _, (kl, slope)) = alone
    parallel = {"world_size": 2, f"{axis}_model_parallel_size": 2}
    for logprobs, frozen, before, after in workers.run(2, drift, hf, parallel):
        # DDP lays the actor's parameters out otherwise: products may round otherwise.
        torch.testing.assert_close(frozen, logprobs, rtol=0, atol=2e-6)
        assert before[0] < 1e-12 and before[1] < 1e-5 * slope
        torch.testing.assert_close(frozen, expected, rtol=0, atol=5e-6)
        assert after == (pytest.approx(kl, rel=1e-3), pytest.approx(slope, rel=1e-3))
