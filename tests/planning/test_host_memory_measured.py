"""The predicted host memory of a batch against the tensors that are there before the updates.

A trainer replays long responses; its models answer with zeros, because on a CPU they cache tables
for each microbatch. Not exercised: what vLLM holds while it samples
(tests/rollout/vllm/test_engine.py), offload and checkpoints (tests/roles/test_device_schedule.py).
"""

import gc
from array import array
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import dumped
from tests.weights.tiny_hf import write_tiny_hf
from tests.whole_run import settings, trainer
from vapo_megatron.data.rollout import Prompt, Rollout, ScoredRollout
from vapo_megatron.planning.host_memory import batch_bytes, step_host_bytes
from vapo_megatron.rollout.dump import write_step

PROMPT, RESPONSE, COUNT = 31, 300, dumped.NUM_RESPONSES
TP2 = {"parallel": {"world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}}
CASES = {
    "VAPO": {},
    "VAPO, all fields": {"algorithm": {"kl_coef": 0.1, "sampler_correction": "icepop"}},
    "GRPO": {"algorithm": {"advantage_estimator": "grpo", "lambda_critic": 1.0}},
    "sequence parallel": TP2,
    "DP2": {"parallel": {"world_size": 2}},
    "CP2": {"parallel": {"world_size": 2, "context_parallel_size": 2}},
    "a prompt for the critic": {"data": {"critic_prompt_column": "hint"}},
}


def long_responses(critic_prompt):
    """All of the same length."""
    return [
        ScoredRollout(
            Rollout(
                prompt=Prompt(
                    position // dumped.GROUP_SIZE,
                    "?",
                    (5,) * PROMPT,
                    "7",
                    critic_token_ids=critic_prompt,
                ),
                sample=position % dumped.GROUP_SIZE,
                position=position,
                token_ids=array("i", [3 + position] * RESPONSE),
                logprobs=array("f", [-4.0] * RESPONSE),
                truncated=False,
                policy_version=0,
            ),
            "",
            "correct" if position % 2 else "wrong",
            1.0,
        )
        for position in range(COUNT)
    ]


def dump(root, critic_prompt):
    scored = long_responses(critic_prompt) if dist.get_rank() == 0 else []
    size = {"num_responses": COUNT, "group_size": dumped.GROUP_SIZE}
    write_step(root, 1, scored, **size, keep_last=1)


def live_storages():
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def prepared(hf, root, run_dir, sections):
    """(predicted, real) bytes of a prepared step on this rank, all tensors that it brought."""
    sections = {
        "rollout": {"max_prompt_tokens": PROMPT, "max_response_tokens": RESPONSE},
        **sections,
    }
    parallel = {"max_tokens_per_microbatch": 400, **sections.get("parallel", {})}
    config = settings(hf, run_dir, **{**sections, "parallel": parallel})

    def zeros(microbatches):
        return torch.zeros(sum(m.outputs.numel() for m in microbatches))

    with trainer(config, root) as made:
        made.actor.compute_logprobs = lambda parts: (zeros(parts), zeros(parts))
        for model in filter(None, (made.critic, made.reference)):
            model.compute_values = model.compute_logprobs = zeros
        before = live_storages()
        data = made.prepare(0)
        after = live_storages()
        count = data.batch.num_responses
    real = sum(size for pointer, size in after.items() if pointer not in before)
    return batch_bytes(config, count * (PROMPT + RESPONSE), count * RESPONSE), real


@pytest.mark.parametrize("case", CASES)
def test_a_batch_and_its_microbatches(workers, tmp_path, case):
    """One set of microbatches: a second would add 16 bytes a token or more, of 55 to 77."""
    hf = write_tiny_hf(tmp_path / "hf", **dumped.MODEL)
    sections = CASES[case]
    size = sections.get("parallel", {}).get("world_size", 1)
    critic_prompt = (6,) * PROMPT if "data" in sections else None
    workers.run(size, dump, tmp_path / "replay", critic_prompt)
    found = workers.run(size, prepared, hf, tmp_path / "replay", tmp_path / "run", sections)
    if case == "CP2":
        # Prompts are at the beginnings, so the rank with the first chunks predicts fewer tokens.
        found = [tuple(map(sum, zip(*found)))]
    for predicted, real in found:
        # What is there once for each response or microbatch is not predicted.
        assert predicted <= real <= 1.04 * predicted


def test_a_step_by_hand():
    """16 responses of at most 31 + 300 tokens on 2 GPUs, one data-parallel rank."""
    sections = {**TP2, "rollout": {"max_prompt_tokens": PROMPT, "max_response_tokens": RESPONSE}}
    config = dumped.config("hf", **sections)
    # Tokens, their padded copy and positions; then index, two masks, place and 6 float32 numbers.
    batch = 24 * 16 * 331 + (8 + 2 + 7 * 4) * 16 * 300
    assert batch_bytes(config, 16 * 331, 16 * 300) == batch
    with mock.patch("vapo_megatron.planning.host_memory.VLLM_HOST_TOKEN_BYTES", 1):
        assert step_host_bytes(config, keeps_rollouts=False) == batch
        # Two replicas of one GPU each: 8 responses, each token 12 bytes.
        assert step_host_bytes(config, keeps_rollouts=True) == batch + 12 * 8 * 300
        more = {"algorithm": {"dynamic_sampling": True}}
        twice = dumped.config("hf", **sections, **more)
        assert step_host_bytes(twice, keeps_rollouts=True) == batch + 2 * 12 * 8 * 300
        # Three groups of 4 in flight over two replicas: two on one of them.
        rollout = {**sections["rollout"], "carry_over_groups": 3, "max_logprob_difference": None}
        carried = dumped.config("hf", **{**sections, "rollout": rollout})
        assert step_host_bytes(carried, keeps_rollouts=True) == batch + 12 * (8 + 2 * 4) * 300
    with mock.patch("vapo_megatron.planning.host_memory.VLLM_HOST_TOKEN_BYTES", 1000):
        assert step_host_bytes(config, keeps_rollouts=False) == 1000 * 8 * 300
