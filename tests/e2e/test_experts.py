"""Whole runs of a tiny mixture of experts: two processes share its experts, trained and sampled.

What the steps compute is held elsewhere (tests/distributed/test_experts.py, test_other_layouts.py);
here vLLM samples, weights are synced and compared, and routes are replayed, through the command
that users start. Minutes:

    bash tests/run.sh tests/e2e/test_experts.py -m slow
"""

import json

import pytest
import torch

from tests.e2e.command_run import command, evaluate, lasting, make_inputs, train
from tests.e2e.started import kill_once

# In float32 the sampler's routes are the trainer's own, and replaying them would show nothing.
SAMPLERS = [
    "algorithm.router_replay=r3", "rollout.compare_routes_every=1", "rollout.dtype=bfloat16",
    "rollout.max_logprob_difference=null",
]  # fmt: skip
EXPERTS = ["parallel.expert_model_parallel_size=2", "algorithm.router_replay=r2"]
TOGETHER = [*EXPERTS, "rollout.tensor_model_parallel_size=2", "rollout.expert_parallel=true"]
APART = [
    *EXPERTS, "rollout.placement=disaggregated", "rollout.num_processes=1", "rollout.lag=1",
    "rollout.max_logprob_difference=null",
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("experts"), "qwen3_moe")


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """(Run directory, its rows): sampled and trained by the same processes."""
    run_dir = tmp_path_factory.mktemp("together") / "whole"
    return run_dir, train(inputs, run_dir, 3, *TOGETHER)


@pytest.mark.slow
def test_sampler_trainer_and_update_agree(whole):
    for step in (2, 3, 4):
        row = whole[1][step]
        assert 0 < row["rollout/logprob_diff_max"] < 1e-4, "sampler and trainer"
        assert row["actor/first_ratio_diff_max"] < 1e-6, "the update and the pass before it"
        assert 0 < row["actor/other_routes_fraction"] < 0.9


@pytest.mark.slow
def test_a_run_goes_on_and_exports_alike(whole, inputs, tmp_path):
    from transformers import AutoModelForCausalLM

    train(inputs, tmp_path / "again", 1, *TOGETHER)
    again = train(inputs, tmp_path / "again", 3, *TOGETHER)
    for step in (3, 4):
        assert lasting(again[step]) == lasting(whole[1][step])
    models = [
        AutoModelForCausalLM.from_pretrained(run_dir / "hf_export", output_loading_info=True)
        for run_dir in (whole[0], tmp_path / "again")
    ]
    for _, report in models:
        assert not report["missing_keys"] and not report["unexpected_keys"]
    first, second = (dict(model.named_parameters()) for model, _ in models)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    config = json.loads((whole[0] / "hf_export/config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]


@pytest.mark.slow
def test_processes_of_their_own_sample_one_step_behind(inputs, tmp_path):
    twice(inputs, tmp_path, *APART)


def twice(inputs, tmp_path, *more):
    """Train twice, bit by bit the same; the rows, by step."""
    first, second = (train(inputs, tmp_path / name, 2, *more) for name in ("one", "two"))
    for step in (2, 3):
        assert lasting(first[step]) == lasting(second[step]), "asynchronous runs replay bit for bit"
        assert first[step]["actor/first_ratio_diff_max"] < 1e-6
    return first


# The sampler's routes


@pytest.fixture(scope="module")
def sampled(inputs, tmp_path_factory):
    """(Run directory, its rows), with vLLM's routes replayed in the trainer."""
    run_dir = tmp_path_factory.mktemp("sampled") / "whole"
    return run_dir, train(inputs, run_dir, 3, *TOGETHER, *SAMPLERS, "logging.dump_steps=4")


@pytest.mark.slow
def test_the_trainer_goes_where_the_sampler_went(sampled):
    for step in (2, 3, 4):
        row = sampled[1][step]
        assert 0 < row["rollout/other_routes_fraction"] < 0.1
        difference = row["rollout/logprob_diff_mean"]
        assert 0 < difference < row["rollout/logprob_diff_own_routes_mean"] < 0.05
        assert row["actor/first_ratio_diff_max"] < 1e-6, "the update and the pass before it"
        assert 0 < row["actor/other_routes_fraction"] < 0.9


@pytest.mark.slow
def test_a_dump_has_the_routes(sampled, inputs, tmp_path):
    given = [*TOGETHER, *SAMPLERS, "--replay", str(sampled[0])]
    again = train(inputs, tmp_path / "again", 3, *given)
    for step in (2, 3, 4):
        for name, value in sampled[1][step].items():
            if name.startswith(("actor/", "critic/", "algorithm/", "rollout/other_routes")):
                assert again[step][name] == value, name


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bits(sampled, inputs, tmp_path):
    run_dir = tmp_path / "killed"
    given = [*TOGETHER, *SAMPLERS, "logging.dump_steps=4", "checkpoint.every_steps=1"]
    metrics = run_dir / "metrics.jsonl"
    kill_once(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2,
        command(inputs, run_dir, 3, *given),
        tmp_path / "log",
    )
    again = train(inputs, run_dir, 3, *given)
    for step in (3, 4):
        assert lasting(again[step]) == lasting(sampled[1][step])


@pytest.mark.slow
def test_groups_that_go_on_over_steps_one_step_behind(inputs, tmp_path):
    more = [*APART, *SAMPLERS, "rollout.carry_over_groups=2", "rollout.max_lag=2"]
    assert twice(inputs, tmp_path, *more)[3]["rollout/lag_max"] > 0


@pytest.mark.slow
def test_what_was_trained_is_evaluated_alike(whole, inputs, tmp_path):
    """By one process and by two that share the experts."""
    found = []
    for size in (1, 2):
        rows = evaluate(
            inputs, whole[0], tmp_path / f"by_{size}.jsonl", "--nproc", str(size),
            f"rollout.tensor_model_parallel_size={size}",
            f"rollout.expert_parallel={str(size > 1).lower()}",
        )  # fmt: skip
        found.append([[(r["text"], r["status"]) for r in row["responses"]] for row in rows])
    assert len(found[0]) == 8 and found[0] == found[1]
