"""The seven techniques with dense rewards: a score is the reward, a threshold says what is right.

Whole trainers make a step of value pretraining and one of the policy on responses that a verifier
has scored. With one threshold some wrong responses have rewards above 0, with the other some
correct ones have rewards below it. Each test states what a technique does with them, by loops over
the scores, and sees the statement fail for what happens when the technique is switched off. Not
exercised: sampling, several ranks (tests/test_trainer_wiring.py, whose rewards are dense, too).
"""

import contextlib
import os
import random
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import reference
from tests.dumped import GROUP_SIZE, MODEL, NUM_RESPONSES, config, rollouts
from tests.weights.tiny_hf import write_tiny_hf
from tests.workers import free_port
from vapo_megatron.reward.verifier import Verdict

LOW, HIGH, ALPHA, MU = -2.0, 2.0, 0.2, 0.1
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
RATIOS = (1.25, 1.3, 0.85, 0.7, 1.0)
"""Of a response's tokens in turn: between the two upper clips, beyond both, and so on downwards."""
OFF = {
    "nothing": {},
    "clip higher": {"clip_high": CLIP_LOW},
    "token-level loss": {"loss_aggregation": "sample"},
    "positive-example loss": {"positive_lm_coef": 0.0},
}
"""What is switched off -> fields of the actor's loss."""


def scores(step):
    """Of each position. Those of the first group differ, and are above both thresholds."""
    draw = random.Random(step)
    drawn = [round(draw.uniform(-1.9, 1.9), 3) for _ in range(NUM_RESPONSES)]
    return [0.6, 0.9, 1.7, 1.2, 0.2, -0.2, *drawn[6:]]


class Reads:
    """A response is its score; what is correct is left to the threshold."""

    def score(self, responses, problems):
        """Judge; see Verifier."""
        return [Verdict("wrong", score=float(response)) for response in responses]


def judged(verifiers, reward, step):
    """The step's responses as a run judges and rewards them."""
    from vapo_megatron.reward.scoring import VerdictStream, score_rollouts

    texts, some = map(str, scores(step)), [s.rollout for s in rollouts(step)]
    # All are judged by the one that the run was given.
    some = [replace(r, prompt=replace(r.prompt, metadata={})) for r in some]
    with VerdictStream(verifiers, lambda ids: [next(texts) for _ in ids]) as stream:
        for rollout in some:
            stream.submit(rollout)
        return score_rollouts(stream, some, reward, 12)


def gradient(actor, mini_batch, loss):
    """Position -> -d loss / d logprobs of its tokens, at RATIOS times the old probabilities.

    Of the actor's own loss, whose model and settings stand-ins replace.
    """
    of_actor, found = "vapo_megatron.roles.actor", {}
    for microbatch in mini_batch.microbatches:
        lengths = microbatch.batch.response_lengths.tolist()
        ratio = torch.tensor([RATIOS[t % len(RATIOS)] for n in lengths for t in range(n)])
        logprobs = (microbatch.batch.old_logprobs + ratio.log()).requires_grad_()
        with (
            mock.patch(f"{of_actor}.Actor.logprobs", lambda *_, x=logprobs, **__: (x, None)),
            mock.patch(f"{of_actor}.loss_settings", lambda config: loss),
        ):
            actor._loss(mini_batch, None, microbatch)[0].backward()
        parts = (-logprobs.grad).split(lengths)
        found |= dict(zip(microbatch.batch.positions.tolist(), map(torch.Tensor.tolist, parts)))
    return found


def given(mini_batch):
    """Position -> what an update is given of the response."""
    return {
        p: {name: getattr(m.batch.narrow(i, 1), name).tolist()
            for name in ("values", "advantages", "returns", "is_correct")}
        for m in mini_batch.microbatches
        for i, p in enumerate(m.batch.positions.tolist())
    }  # fmt: skip


class Step(NamedTuple):
    """A step, as its updates saw it."""

    roles: dict[str, list[Any]]
    """Role -> what each of its updates was given."""
    gradients: list[dict[str, Any]]
    """Of each of the actor's updates, with what is switched off."""
    metrics: dict[str, float]
    policy_version: int


def trained(hf, run_dir, threshold, port):
    """(steps, kept by dynamic sampling, verdicts); a worker's function."""
    from vapo_megatron.reward.verifiers import Verifiers
    from vapo_megatron.roles.actor import loss_settings
    from vapo_megatron.rollout.dynamic_sampling import sample_mixed_groups
    from vapo_megatron.rollout.source import RolloutSource
    from vapo_megatron.training.loop import VapoTrainer

    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    settings = config(
        hf,
        reward={"from_score": [LOW, HIGH], "correct_from": threshold, "num_workers": 1,
                "timeout_seconds": 60.0},
        algorithm={
            "value_pretraining_steps": 1, "policy_steps": 1, "length_adaptive_alpha": ALPHA,
            "positive_lm_coef": MU, "value_bound": HIGH,
        },
        logging={"run_dir": str(run_dir), "tensorboard": False, "progress": "off"},
    )  # fmt: skip
    with Verifiers(settings.reward, Reads) as verifiers:
        sampled = [judged(verifiers, settings.reward, step) for step in range(2)]

    class Sampled(RolloutSource):
        def rollouts(self, step, policy_version, phase, **_):
            return sampled[step], {}

    steps, loss = [], loss_settings(settings)
    made = mock.patch.object(VapoTrainer, "_source", lambda *_: Sampled())
    with made, VapoTrainer(settings) as trainer:
        seen = {}
        for role in ("critic", "actor"):
            model = getattr(trainer, role)

            def watched(mini_batches, role=role, update=model.update):
                seen[role] = list(mini_batches)
                return update(mini_batches)

            model.update = watched
        for step in range(2):
            seen.clear()
            metrics = trainer.train_step(step)
            steps.append(
                Step(
                    {role: list(map(given, some)) for role, some in seen.items()},
                    [{off: gradient(trainer.actor, mini, loss._replace(**fields))
                      for off, fields in OFF.items()}
                     for mini in seen.get("actor", ())],
                    metrics,
                    trainer.policy_version,
                )
            )  # fmt: skip

        def kept(judged, *reward):
            """(rewards that dynamic sampling keeps, its metrics)."""
            left = list(judged)

            def sample(number, count):
                groups = [left.pop(0) for _ in range(count * GROUP_SIZE)]
                moved = [replace(s.rollout, position=p) for p, s in enumerate(groups)]
                return [replace(s, rollout=r) for s, r in zip(groups, moved, strict=True)]

            found, of_sampling = sample_mixed_groups(
                sample,
                lambda name: contextlib.nullcontext(),
                settings.algorithm.model_copy(update={"responses_per_step": GROUP_SIZE}),
                *reward,
            )
            return [s.reward for s in found], of_sampling

        # A first group of one score, whose lengths alone are punished.
        punished = [replace(s, score=0.75, reward=0.75 - p) for p, s in enumerate(sampled[1])]
        equal = [*punished[:GROUP_SIZE], *sampled[1]]
        of_sampling = [
            kept(sampled[1]), kept(sampled[1], settings.reward), kept(equal, settings.reward)
        ]  # fmt: skip
    verdicts = [[(s.status, s.reward, s.score) for s in some] for some in sampled]
    return steps, of_sampling, verdicts


class Run(NamedTuple):
    threshold: float
    steps: list[Step]
    kept: list[tuple[list[float], dict[str, float]]]
    """By verdicts, by rewards, and by rewards behind a group whose scores are equal."""
    verdicts: list[list[tuple[str, float, float]]]


@pytest.fixture(scope="module", params=[0.5, -0.5])
def run(request, workers, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("dense")
    hf = write_tiny_hf(tmp / "hf", **MODEL)
    (found,) = workers.run(1, trained, hf, tmp / "run", request.param, free_port())
    return Run(request.param, *found)


def lengths(step):
    return [len(s.rollout.token_ids) for s in rollouts(step)]


def merged(mini_batches):
    """Position -> fields, over the step's updates."""
    return {p: fields for mini in mini_batches for p, fields in mini.items()}


def gae(score, values, lam):
    return reference.gae([0.0] * (len(values) - 1) + [score], values, [0, len(values)], lam)


def fails(statement, *arguments):
    with pytest.raises(AssertionError):
        statement(*arguments)


def test_the_reward_is_the_score_and_the_threshold_decides(run):
    for step, verdicts in enumerate(run.verdicts):
        assert [(reward, score) for _, reward, score in verdicts] == [(s, s) for s in scores(step)]
        assert [status == "correct" for status, *_ in verdicts] == [
            s >= run.threshold for s in scores(step)
        ]
        # The reward's sign would choose others.
        assert any((s >= run.threshold) != (s > 0) for s in scores(step))
        metrics = run.steps[step].metrics
        assert metrics["reward/mean"] == pytest.approx(sum(scores(step)) / NUM_RESPONSES)
        right = sum(s >= run.threshold for s in scores(step))
        assert metrics["reward/correct_fraction"] == right / NUM_RESPONSES


def test_value_pretraining_regresses_on_scores_and_leaves_the_policy(run):
    first, second = run.steps
    assert (first.roles.keys(), first.policy_version) == ({"critic"}, 0)
    assert (second.roles.keys(), second.policy_version) == ({"critic", "actor"}, 1)
    means = [
        sum(scores(0)[p] * lengths(0)[p] for p in mini) / sum(lengths(0)[p] for p in mini)
        for mini in first.roles["critic"]
    ]
    assert len(means) == 2 and first.metrics["critic/return_mean"] == pytest.approx(fmean(means))


def test_decoupled_gae_gives_the_critic_the_score_at_every_token(run):
    def every_return_is_the_score(of_critic):
        for step, of_responses in enumerate(of_critic):
            for position, fields in of_responses.items():
                expected = [scores(step)[position]] * lengths(step)[position]
                assert fields["returns"] == pytest.approx(expected, abs=1e-5)

    of_critic = [merged(step.roles["critic"]) for step in run.steps]
    every_return_is_the_score(of_critic)
    # With the actor's lambda for both, a return is the advantage and the value.
    coupled = [
        {
            p: {"returns": [a + v for a, v in zip(f["advantages"], f["values"])]}
            for p, f in of.items()
        }
        for of in of_critic
    ]
    fails(every_return_is_the_score, coupled)
    values = [v for of in of_critic for f in of.values() for v in f["values"]]
    assert max(map(abs, values)) < HIGH and max(values) - min(values) > 0.05, "within the bound"


def test_length_adaptive_gae_spreads_the_score_over_each_length(run):
    of_actor = merged(run.steps[1].roles["actor"])

    def advantages_are_those_of(lambda_of):
        for position, fields in of_actor.items():
            n, score = lengths(1)[position], scores(1)[position]
            expected = gae(score, fields["values"], lambda_of(n))
            assert fields["advantages"] == pytest.approx(expected, abs=1e-5), position

    advantages_are_those_of(lambda n: max(0.0, 1 - 1 / (ALPHA * n)))
    assert len({n for n in lengths(1) if n > 1 / ALPHA}) > 3
    for fixed in (0.95, 1.0, 0.5):
        fails(advantages_are_those_of, lambda n, fixed=fixed: fixed)


def test_clip_higher_token_level_and_positive_example_loss(run):
    """-d loss / d logprob of every token of every update."""
    step = run.steps[1]
    updates = list(zip(step.roles["actor"], step.gradients, strict=True))

    def each_has_this_gradient(off, high=CLIP_HIGH, by_token=True, mu=MU):
        for responses, gradients in updates:
            right = {p for p in responses if scores(1)[p] >= run.threshold}
            total = sum(lengths(1)[p] for p in responses)
            positive = sum(lengths(1)[p] for p in right)
            for position, fields in responses.items():
                n, expected = lengths(1)[position], []
                weight = 1 / total if by_token else 1 / (len(responses) * n)
                for t, advantage in enumerate(fields["advantages"]):
                    ratio = RATIOS[t % len(RATIOS)]
                    is_clipped = ratio > 1 + high if advantage > 0 else ratio < 1 - CLIP_LOW
                    imitated = mu / positive if position in right else 0.0
                    expected.append((not is_clipped) * advantage * ratio * weight + imitated)
                assert gradients[off][position] == pytest.approx(expected, abs=1e-5), position

    each_has_this_gradient("nothing")
    each_has_this_gradient("clip higher", high=CLIP_LOW)
    each_has_this_gradient("token-level loss", by_token=False)
    each_has_this_gradient("positive-example loss", mu=0.0)
    # Each of them is seen: what is right without it is wrong with it.
    for without in ({"high": CLIP_LOW}, {"by_token": False}, {"mu": 0.0}):
        with pytest.raises(AssertionError):
            each_has_this_gradient("nothing", **without)


def test_the_positive_examples_are_those_above_the_threshold(run):
    """Whatever the sign of their reward or advantage."""
    for responses, gradients in zip(run.steps[1].roles["actor"], run.steps[1].gradients):
        for position, fields in responses.items():
            with_loss, without = (
                gradients[off][position] for off in ("nothing", "positive-example loss")
            )
            is_imitated = [a - b > 1e-6 for a, b in zip(with_loss, without, strict=True)]
            assert set(is_imitated) == {scores(1)[position] >= run.threshold}
            assert fields["is_correct"] == [scores(1)[position] >= run.threshold]
    chosen = {s for s in scores(1) if s >= run.threshold}
    assert chosen != {s for s in scores(1) if s > 0}


def test_groups_are_sampled_whole_and_dropped_by_correctness_or_by_rewards(run):
    """The first group's rewards differ, but its verdicts do not."""
    for first in range(0, NUM_RESPONSES, GROUP_SIZE):
        group = [s.rollout for s in rollouts(1)[first : first + GROUP_SIZE]]
        assert [r.sample for r in group] == [*range(GROUP_SIZE)] and len(
            {r.prompt for r in group}
        ) == 1
    (rewards, metrics), graded, behind_equal = run.kept
    # Of four groups the first one that is mixed.
    groups = [scores(1)[i : i + GROUP_SIZE] for i in range(0, NUM_RESPONSES, GROUP_SIZE)]
    mixed = [g for g in groups if 0 < sum(s >= run.threshold for s in g) < GROUP_SIZE]
    assert rewards == mixed[0] != groups[0]
    assert metrics["rollout/groups_dropped_all_correct"] == groups.index(mixed[0])
    assert len(set(groups[0])) == GROUP_SIZE
    # Where scores are the rewards, there is something to learn from the first group.
    assert graded[0] == behind_equal[0] == groups[0]
    assert graded[1]["rollout/groups_dropped_all_correct"] == 0
    dropped = [behind_equal[1][f"rollout/groups_dropped_all_{of}"] for of in ("correct", "wrong")]
    statuses = {status for status, _, _ in run.verdicts[1][:GROUP_SIZE]}
    assert dropped == ([1, 0] if statuses == {"correct"} else [0, 1])
