"""vLLM's own routes come with the responses, of every token that was read, whoever read it.

Real engines in two gloo processes, a tiny Qwen3-MoE in float32 whose routers transformers computes
again. Not exercised: vLLM's runner for GPUs, which calls by itself what returned_routes.py calls
here.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.rollout.vllm import route_jobs as jobs
from tests.rollout.vllm.test_engine import FAMILIES, TINY
from tests.weights.tiny_hf import write_tiny_model

TIE = 1e-4
"""Where a router's logits are closer than this, float32 may choose either expert."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    tmp, sizes = tmp_path_factory.mktemp("models"), {**TINY, **FAMILIES["qwen3_moe"]}
    return [write_tiny_model(tmp / str(seed), **sizes, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def references(models):
    return [AutoModelForCausalLM.from_pretrained(path).eval() for path in models]


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="two replicas"), pytest.param(2, marks=pytest.mark.slow, id="TP 2")],
)
def found(request, vllm_workers, models, tmp_path_factory):
    """What each rank found."""
    tmp = tmp_path_factory.mktemp("run")
    return vllm_workers.run(2, jobs.returned, tmp, *models, request.param, timeout_seconds=280)


def assert_routes(rollouts, model):
    """All tokens but the last are in the experts that transformers' routers choose."""
    ties = tokens = 0
    for rollout in rollouts:
        sequence = torch.tensor(rollout.sequence.tolist())
        # What an environment says last is read by nobody.
        read = int(rollout.places[-1])
        with torch.no_grad():
            logits = model(sequence[None], output_router_logits=True).router_logits
        per_token = model.config.num_experts_per_tok
        assert rollout.routes.shape == (read, len(logits) * per_token)
        assert rollout.routes.dtype == np.uint8
        for layer, of_layer in enumerate(logits):
            best = of_layer[:read].topk(per_token + 1)
            is_clear = (best.values[:, -2] - best.values[:, -1]) > TIE
            own = rollout.routes[:, layer * per_token : (layer + 1) * per_token].astype(np.int64)
            same = torch.from_numpy(own).sort(-1).values == best.indices[:, :-1].sort(-1).values
            assert same[is_clear].all(), (rollout.position, layer)
            ties, tokens = ties + int((~is_clear).sum()), tokens + len(is_clear)
    assert ties < 0.01 * tokens


@pytest.mark.parametrize("kind", ["groups", "turns", "cut"])
def test_they_are_those_of_every_token_that_was_read(found, references, kind):
    rollouts = [rollout for rank in found for rollout in rank[kind] if rollout.token_ids]
    assert len({rollout.position for rollout in rollouts if rollout.routes is not None}) > 8
    kept = [rollout for rollout in rollouts if rollout.routes is not None]
    assert_routes(kept, references[0])
    if kind == "turns":
        assert max(rollout.num_inserted for rollout in kept) > 0


def test_what_goes_on_has_those_of_the_weights_that_read_it_last(found, references):
    gone_on = [rollout for rank in found for rollout in rank["gone on"] if rollout.versions[1:]]
    kept = [rollout for rollout in gone_on if rollout.routes is not None]
    assert len(kept) > 4
    assert_routes(kept, references[1])
    with pytest.raises(AssertionError):
        assert_routes(kept, references[0])


def test_nobody_asks_for_those_of_an_evaluation(found):
    assert all(rollout.routes is None for rank in found for rollout in rank["evaluation"])


def test_a_preempted_response_has_all_of_them(vllm_workers, found, models, references, tmp_path):
    for preemptions, rollouts in vllm_workers.run(2, jobs.preempted, tmp_path, models[0]):
        assert preemptions > 0
        assert_routes(rollouts, references[0])
