"""The tiny task's reward model: its data, what it scores, what a critic reads of it, and a run.

Not exercised: other tasks, and a reward model with a bias (tests/weights).
"""

import dataclasses
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForSequenceClassification

from tests import jsonl
from tests.cut import batch_of

TINY = Path(__file__).parents[2] / "examples" / "tiny"
sys.path.insert(0, str(TINY))

import make_base_model  # noqa: E402
import make_reward_model  # noqa: E402
import task  # noqa: E402
from make_reward_model import Recipe, Scored  # noqa: E402

from tests.e2e.test_run import SMALL, ended  # noqa: E402
from tests.e2e.test_run import TINY as TINY_CONFIG  # noqa: E402
from vapo_megatron.cli.train import main  # noqa: E402
from vapo_megatron.rollout.dump import read_file, read_headers  # noqa: E402

SHORT = Recipe(
    sampled=16, held_out=8, iterations=5, batch_size=4, batches_per_pool=2, least_right=0.0
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model that was trained for a moment."""
    directory = tmp_path_factory.mktemp("tiny") / "base"
    make_base_model.make(
        directory, make_base_model.Recipe(iterations=6, batch_size=4, batches_per_pool=4)
    )
    return directory


@pytest.fixture(scope="module")
def reward_model(base):
    """A reward model that was trained for a moment."""
    assert make_reward_model.make(base.parent / "reward", base, SHORT)
    return base.parent / "reward"


def draw(rng, tokenizer):
    return make_reward_model.constructed(rng, SHORT, tokenizer, held_out=True)


def test_rewards_of_constructed_chains_by_hand(base):
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    rng = random.Random(0)
    drawn = [draw(rng, tokenizer) for _ in range(600)]
    whole = [s for s in drawn if s.response[-1:] == [tokenizer.eos_token_id]]
    cut = [s for s in drawn if s not in whole]
    # Half of them are cut off, 300 +- 12, before the answer; a tenth of those to nothing, 30 +- 5.
    assert 260 < len(cut) < 340 and 15 < sum(not s.response for s in cut) < 45
    assert all(s.reward == -1.0 for s in cut)
    texts = tokenizer.batch_decode([s.response for s in cut])
    assert not any("Answer:" in text for text in texts)
    assert len({len(text) // 20 for text in texts}) > 4, "cut anywhere"
    guessed = 0
    for scored in whole:
        prompt, *rest = tokenizer.batch_decode([scored.prompt, scored.response])
        # Qa9b*2c-3=: the start value, then label, operation and operand.
        value = int(prompt[2])
        for op, operand in zip(prompt[4:-1:3], prompt[5:-1:3], strict=True):
            n = int(operand)
            value = {"+": value + n, "-": value - n, "*": value * n}[op] % 10
        right = rest[0].endswith(f"Answer:{value}<|endoftext|>")
        assert scored.reward == (1.0 if right else -1.0)
        guessed += "~" in rest[0]
        assert right or "~" in rest[0]
    # Half are computed throughout, 150 +- 9; of the others nearly all guess, and few are right.
    assert 120 < sum(s.reward > 0 for s in whole) < 200
    assert 110 < guessed < 180


def test_transformers_and_the_critic_read_the_same_values(reward_model, base, workers):
    """transformers' own score, of a padded batch, is the one at the stop token."""
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    rng = random.Random(1)
    some = [draw(rng, tokenizer) for _ in range(5)]
    model = Qwen2ForSequenceClassification.from_pretrained(str(reward_model)).eval()
    values = make_reward_model.read_values(model, some)
    assert [len(v) for v in values] == [len(s.response) + 1 for s in some]
    ids, last, rewards = make_reward_model.pad(some, padding=0)
    assert rewards.tolist() == [s.reward for s in some] and len(set(last.tolist())) > 1
    with torch.no_grad():
        scores = model(ids).logits[:, 0]
    torch.testing.assert_close(scores, torch.stack([v[-1] for v in values]))
    (found,) = workers.run(1, critic_values, base, reward_model, some)
    earlier = torch.cat([v[:-1] for v in values])
    torch.testing.assert_close(found, earlier, rtol=1e-4, atol=1e-5)
    assert earlier.std() > 0.01


def critic_values(base, reward_model, some):
    """V before each response token, of the trainer's critic; a worker's function."""
    from vapo_megatron.config import VapoConfig
    from vapo_megatron.data.microbatch import make_microbatch
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel import groups
    from vapo_megatron.roles.critic import Critic

    paths = {"hf_path": str(base), "critic_hf_path": str(reward_model)}
    config = VapoConfig.model_validate({"model": {**paths, "dtype": "float32"}})
    place = groups.initialize(config.parallel)
    critic = Critic(read_model_shape(base), config, place, config.model.critic_hf_path)
    sequences = [s.prompt + s.response for s in some]
    responses = [len(s.response) for s in some]
    tokens = torch.tensor([i for sequence in sequences for i in sequence])
    batch = batch_of(tokens, list(map(len, sequences)), responses)
    return critic.compute_values([make_microbatch(batch)])


def test_only_last_tokens_are_scored_in_training(base):
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    recipe = dataclasses.replace(SHORT, iterations=1, batch_size=2, sampled_share=1.0)
    model = make_reward_model.build_model(base, recipe)
    own = [Scored([5, 6], [7, 1], 1.0), Scored([5, 6, 8], [9, 9, 1], -1.0)]
    with torch.no_grad():
        by_length = {
            n: model.model(torch.tensor([s.prompt + s.response])).last_hidden_state[0, -1]
            for n, s in ((4, own[0]), (6, own[1]))
        }
    seen = []
    hook = model.score.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].detach()))
    found = make_reward_model.losses(model, recipe, tokenizer, own)
    recipe.train(model, found, lambda done, loss: None)
    hook.remove()
    (hidden,) = seen
    assert hidden.shape == (2, 64)
    for row in hidden:
        assert min(float((row - h).abs().max()) for h in by_length.values()) < 1e-4


def test_the_report_by_hand(monkeypatch):
    some = [Scored([0], [0, 0], 1.0), Scored([0], [0], 1.0), Scored([0], [0, 0], -1.0)]
    values = [[0.5, 0.5, 1.0], [0.5, -1.0], [0.5, 0.5, -1.0]]
    monkeypatch.setattr(
        make_reward_model, "read_values", lambda *_: list(map(torch.tensor, values))
    )
    report = make_reward_model.report(torch.nn.Identity(), some)
    # Scores 1, -1, -1 for rewards 1, 1, -1.
    assert report["accuracy"] == pytest.approx(2 / 3)
    assert report["balanced_accuracy"] == pytest.approx((1 / 2 + 1) / 2)
    # Returns 1, 1, 1, -1, -1: the same V everywhere explains nothing of them.
    assert report["explained_variance_earlier"] == pytest.approx(0, abs=1e-6)
    assert report["mean_value_earlier"] == pytest.approx(0.5)
    assert report["mean_return_earlier"] == pytest.approx(1 / 5)


def test_same_seed_same_bytes(reward_model, base, tmp_path):
    assert not make_reward_model.make(reward_model, base, SHORT), "it is kept"
    assert make_reward_model.make(tmp_path / "again", base, SHORT)
    assert make_reward_model.make(tmp_path / "other", base, dataclasses.replace(SHORT, seed=1))
    read = [(d / "model.safetensors").read_bytes() for d in (reward_model, tmp_path / "again")]
    assert read[0] == read[1] != (tmp_path / "other/model.safetensors").read_bytes()
    config = json.loads((reward_model / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]


@pytest.mark.slow
def test_a_run_whose_rewards_are_its_scores(launch, base, reward_model, tmp_path):
    """Two processes with TP2, by turns; the held-out problems have another verifier."""
    held_out = tmp_path / "test.jsonl"
    task.write_jsonl(tmp_path / "train.jsonl", task.training_problems(40, 0))
    task.write_jsonl(held_out, task.test_problems(6, 0))
    rows_of_file = jsonl.read(held_out)
    jsonl.write(held_out, ({**r, "verifier": "math"} for r in rows_of_file))
    given = [
        "--config", str(TINY_CONFIG), *SMALL, f"model.hf_path={base}",
        f"model.reward_hf_path={reward_model}", "reward.verifier=reward_model",
        "reward.from_score=[-50,50]", "reward.correct_from=0.0", "parallel.offload=true",
        f"data.train_path={tmp_path}/train.jsonl", f"evaluation.path={held_out}",
        "algorithm.policy_steps=2", "logging.dump_steps=3", f"logging.run_dir={tmp_path}/run",
    ]  # fmt: skip
    ended(launch(main, given, world_size=2))
    first, *steps = jsonl.read(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2, 3] and "evaluation/avg@2" in first
    model = Qwen2ForSequenceClassification.from_pretrained(str(reward_model)).eval()
    for row in steps:
        kept = [
            item
            for path, _ in read_headers(tmp_path / "run/replay", row["step"])
            for item in read_file(path)
        ]
        assert len(kept) == 32
        responses = [
            Scored(list(s.rollout.prompt.token_ids), list(s.rollout.token_ids), 0.0) for s in kept
        ]
        scores = [float(v[-1]) for v in make_reward_model.read_values(model, responses)]
        assert [s.reward for s in kept] == pytest.approx(scores, abs=1e-3)
        assert [s.is_correct for s in kept] == [s.reward >= 0 for s in kept]
        assert row["reward/mean"] == pytest.approx(sum(scores) / 32, abs=1e-3)
        assert row["time/reward_scores_seconds"] > 0
    assert steps[-1]["actor/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_right_at_the_end_and_far_too_low_before(tmp_path):
    """What value pretraining is for: accurate where it was trained, no value function elsewhere."""
    make_base_model.make(tmp_path / "base", make_base_model.Recipe())
    make_reward_model.make(tmp_path / "reward", tmp_path / "base", Recipe())
    reports = json.loads((tmp_path / "reward/report.json").read_text())
    for name in ("sampled", "constructed"):
        assert reports[name]["accuracy"] > 0.87, reports
        assert reports[name]["explained_variance_earlier"] < 0.1, reports
        earlier = reports[name]["mean_value_earlier"], reports[name]["mean_return_earlier"]
        assert earlier[0] < earlier[1] - 1, reports
    assert reports["constructed"]["balanced_accuracy"] > 0.9, reports
