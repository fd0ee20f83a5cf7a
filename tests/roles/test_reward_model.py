"""The reward model's scores, in every kind of layout, against transformers in float64.

What a step makes of them is in tests/test_reward_model_wiring.py, when the model is on the device
in tests/roles/test_device_schedule.py. Not exercised: a GPU, bfloat16, virtual stages.
"""

import pytest
import torch

from tests.distributed.float64 import load_critic
from tests.dumped import MODEL
from tests.roles.test_roles import batch
from tests.weights.tiny_hf import write_tiny_reward_model

BIAS = 0.75
PENDING = [True, False, False, True]


def scores(path, parallel):
    """(all scores, those of what is pending, on every rank, how much went through the model)."""
    from vapo_megatron.config import VapoConfig
    from vapo_megatron.data.batch import StepSummary
    from vapo_megatron.data.rollout import STATUSES
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.models.partition import microbatch_options
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.minibatches import make_microbatches
    from vapo_megatron.roles.reward_model import RewardModel

    config = VapoConfig.model_validate(
        {"model": {"reward_hf_path": str(path), "dtype": "float32"}, "parallel": parallel}
    )
    place = groups.initialize(config.parallel)
    model = RewardModel(read_model_shape(path), config, place)
    cut = microbatch_options(config.model, config.parallel, place)
    whole = batch()
    # The last sequence as a prompt alone.
    empty = whole.narrow(3, 1).replace(
        cu_seqlens=torch.tensor([0, 0]).int(), places=torch.empty(0).int(),
        **dict.fromkeys(("loss_mask", "rollout_logprobs"), torch.empty(0)),
        **dict.fromkeys(("reference_logprobs", "values", "advantages", "returns")),
    )  # fmt: skip
    every = model.compute_scores(make_microbatches(whole, [2, 2], **cut))
    (microbatch,) = make_microbatches(empty, [1], **cut)
    of_prompt = model.compute_scores([microbatch])
    # Each data-parallel rank has consecutive responses.
    count = 4 // place.dp_size
    own = whole.narrow(place.dp_rank * count, count)
    statuses = torch.where(torch.tensor(PENDING), len(STATUSES), 0)
    summary = StepSummary(*[statuses] * 4, torch.zeros(4), *[statuses] * 3)
    seen, compute = [], model.compute_scores

    def watched(microbatches):
        seen.extend(m.batch.num_responses for m in microbatches)
        return compute(microbatches)

    model.compute_scores = watched
    sizes = [1] * count if place.dp_size == 2 else [2, 2]
    pending = model.score_pending(summary, make_microbatches(own, sizes, **cut))
    return every, of_prompt, pending, seen


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """(directory, float64 [4] of the batch's responses), one after the other, unpacked."""
    path = write_tiny_reward_model(tmp_path_factory.mktemp("reward_model"), bias=BIAS, **MODEL)
    model, whole = load_critic(str(path)), batch()
    bounds = whole.sequence_cu_seqlens.tolist()
    with torch.no_grad():
        states = [
            model.model(whole.tokens[None, a:b], use_cache=False).last_hidden_state[0, -1]
            for a, b in zip(bounds, bounds[1:])
        ]
        expected = model.lm_head(torch.stack(states))[:, 0] + BIAS
    # Two positions of one response have different scores.
    assert expected.std() > 0.1
    return path, expected


LAYOUTS = {
    "one process": {},
    "TP2": {"world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"world_size": 2, "pipeline_model_parallel_size": 2},
    "DP2": {"world_size": 2},
    "CP2": {"world_size": 2, "context_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_read_at_the_last_token(workers, reward_model, layout):
    path, expected = reward_model
    parallel = LAYOUTS[layout]
    ranks = workers.run(parallel.get("world_size", 1), scores, path, parallel)
    for every, of_prompt, pending, _ in ranks:
        assert of_prompt.tolist() == pytest.approx(every[3:].tolist(), abs=5e-6)
        assert every.dtype == pending.dtype == torch.float32
        torch.testing.assert_close(every.double(), expected, rtol=0, atol=5e-6)
        assert torch.equal(pending, ranks[0][2]), "all ranks hold the same"
        chosen = torch.tensor(PENDING)
        torch.testing.assert_close(pending.double(), expected * chosen, rtol=0, atol=5e-6)
    # Only what is pending goes through the model: one of each microbatch, or of each rank.
    assert [seen for *_, seen in ranks] == (
        [[1], [1]] if layout == "DP2" else [[1, 1]] * len(ranks)
    )
