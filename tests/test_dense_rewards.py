"""Dense rewards through a whole trainer: a score is the reward, a threshold says what is right.

A step of value pretraining and one of the policy on responses that a verifier has scored. With one
threshold some wrong responses have rewards above 0, with the other some correct ones have rewards
below it. Not exercised: what advantages and returns become (tests/test_trainer_wiring.py, whose
rewards are dense, too), what the losses make of them (tests/roles/test_roles.py), sampling.
"""

import contextlib
import random
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import pytest

from tests.dumped import GROUP_SIZE, MODEL, NUM_RESPONSES, rollouts
from tests.weights.tiny_hf import write_tiny_hf
from tests.whole_run import Given, settings, trainer
from vapo_megatron.reward.verifier import Verdict

LOW, HIGH = -2.0, 2.0


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


def given(mini_batch):
    """Position -> what an update is given of the response."""
    names = ("returns", "is_correct", "is_positive")
    return {
        p: {name: getattr(m.batch.narrow(i, 1), name).tolist() for name in names}
        for m in mini_batch.microbatches
        for i, p in enumerate(m.batch.positions.tolist())
    }


class Step(NamedTuple):
    """A step, as its updates saw it."""

    roles: dict[str, list[Any]]
    """Role -> what each of its updates was given."""
    metrics: dict[str, float]
    policy_version: int


def trained(hf, run_dir, threshold):
    """(steps, kept by dynamic sampling, verdicts); a worker's function."""
    from vapo_megatron.reward.verifiers import Verifiers
    from vapo_megatron.rollout.dynamic_sampling import Round, sample_mixed_groups

    c = settings(
        hf,
        run_dir,
        reward={"from_score": [LOW, HIGH], "correct_from": threshold, "num_workers": 1,
                "timeout_seconds": 60.0},
        algorithm={"value_pretraining_steps": 1, "policy_steps": 1, "value_range": [LOW, HIGH]},
    )  # fmt: skip
    reward = c.reward
    with Verifiers(reward, Reads) as verifiers:
        sampled = [judged(verifiers, reward, step) for step in range(2)]
    steps = []
    with trainer(c, source=lambda _: Given(lambda asked: sampled[asked.step])) as made:
        seen = {}
        for role in ("critic", "actor"):
            model = getattr(made, role)

            def watched(mini_batches, role=role, update=model.update):
                seen[role] = list(mini_batches)
                return update(mini_batches)

            model.update = watched
        for step in range(2):
            seen.clear()
            metrics = made.train_step(step)
            of_roles = {role: list(map(given, some)) for role, some in seen.items()}
            steps.append(Step(of_roles, metrics, made.policy_version))

        def kept(judged, *reward):
            """(rewards that dynamic sampling keeps, its metrics)."""
            left = list(judged)

            def sample(number, count):
                groups = [left.pop(0) for _ in range(count * GROUP_SIZE)]
                moved = [replace(s.rollout, position=p) for p, s in enumerate(groups)]
                found = [replace(s, rollout=r) for s, r in zip(groups, moved, strict=True)]
                return Round(found, [GROUP_SIZE] * count)

            found, of_sampling = sample_mixed_groups(
                sample,
                lambda name: contextlib.nullcontext(),
                c.algorithm.model_copy(update={"responses_per_step": GROUP_SIZE}),
                *reward,
            )
            return [s.reward for s in found], of_sampling

        # A first group of one score, whose lengths alone are punished.
        punished = [replace(s, score=0.75, reward=0.75 - p) for p, s in enumerate(sampled[1])]
        equal = [*punished[:GROUP_SIZE], *sampled[1]]
        of_sampling = [
            kept(sampled[1]), kept(sampled[1], reward), kept(equal, reward)
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
    (found,) = workers.run(1, trained, hf, tmp / "run", request.param)
    return Run(request.param, *found)


def lengths(step):
    return [len(s.rollout.token_ids) for s in rollouts(step)]


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


def test_the_critics_returns_are_the_scores(run):
    """lambda is 1 for it."""
    for step, seen in enumerate(run.steps):
        for responses in seen.roles["critic"]:
            for position, fields in responses.items():
                expected = [scores(step)[position]] * lengths(step)[position]
                assert fields["returns"] == pytest.approx(expected, abs=1e-5)


def test_the_positive_examples_are_those_above_the_threshold(run):
    """Whatever the sign of their reward or advantage."""
    for responses in run.steps[1].roles["actor"]:
        for position, fields in responses.items():
            is_right = scores(1)[position] >= run.threshold
            assert fields["is_correct"] == [is_right] and set(fields["is_positive"]) == {is_right}
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
