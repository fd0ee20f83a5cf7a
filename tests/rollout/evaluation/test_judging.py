"""Judging problems over replicas, and the numbers that evaluate makes of it.

The sampler is a stand-in whose responses depend on problem and sample; processes, collectives and
the verifier are real. Not exercised: vLLM (tests/e2e/test_evaluate.py).
"""

import dataclasses
import math
from array import array

import pytest
import torch.distributed as dist

from tests.whole_run import Engine, answered
from vapo_megatron.config import EvaluationConfig, RewardConfig, RolloutConfig
from vapo_megatron.data.labels import labels_of
from vapo_megatron.data.problems import Problem
from vapo_megatron.data.rollout import Episode, Prompt, Turn
from vapo_megatron.errors import Stopped
from vapo_megatron.reward.math_verifier import MathVerifier
from vapo_megatron.reward.reward_model import Pending
from vapo_megatron.reward.verifier import RunningVerifier, Verdict
from vapo_megatron.rollout.evaluation.judging import evaluate, judge_problems
from vapo_megatron.rollout.requests import request_seed

SAMPLES = 4
LABELS = labels_of(
    [
        (i, Problem("", "", {"verifier": "exact" if i in (2, 3) else None}, source))
        for i, source in enumerate("xyxyy")
    ],
    "math",
)
# Evaluate's batches hold 2 * 2 // 4 = 1 problem for each replica.
SECTIONS = (
    EvaluationConfig(samples=SAMPLES),
    RolloutConfig(max_response_tokens=99, max_num_sequences=2),
)


def decode(responses):
    """Of what Sampler makes: right where problem + sample is divisible by 3, but for sample 3."""
    texts = []
    for index, sample in (divmod(token_ids[0], SAMPLES) for token_ids in responses):
        text = f"Answer: {index if (index + sample) % 3 == 0 else 100 + sample % 2}"
        if sample == 3 and index != 3:
            # A thousand characters are read, no more.
            text = "no idea" if index else "Answer: " + "12" * 501
        texts.append(text)
    return texts


class Sampler(Engine):
    """Responses of a replica, which name their problem and sample; see decode."""

    def __init__(self, *replica, keeps_rollouts=True):
        super().__init__(*replica)
        self.keeps_rollouts = keeps_rollouts
        self.sizes = []

    def asked(self, requests, *_):
        self.sizes.append(len(requests))
        # The same noise at every step, none of training's.
        for rollout, seed, *_ in requests:
            expected = request_seed(0, 0, "evaluation", rollout.prompt.index, rollout.sample)
            assert seed == expected

    def respond(self, rollout, seed):
        number = rollout.prompt.index + rollout.sample
        ids = [SAMPLES * rollout.prompt.index + rollout.sample] * (1 + number)
        return answered(rollout, ids, logprob=0.0, truncated=number > 5)


def problems(count):
    return [Prompt(i, f"problem {i}", (1, 2), str(i)) for i in range(count)]


def forbidden(*_, **__):
    raise AssertionError("responses stay on the rank that judged them")


def judged_on(replicas_of, count, batch, reward=None):
    """Worker: judge_problems' batches and evaluate's numbers; replicas_of ranks form a replica."""
    rank, size = dist.get_rank(), dist.get_world_size()
    is_first = rank % replicas_of == 0
    sampler = Sampler(rank // replicas_of, size // replicas_of, keeps_rollouts=is_first)
    verifier = MathVerifier(1, 60) if is_first else None
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather_object", "all_gather_object", "broadcast_object_list"):
            patch.setattr(dist, name, forbidden)
        batches = list(
            judge_problems(
                sampler, verifier, problems(count), *SECTIONS, decode=decode,
                policy_version=0, on_progress=lambda *at: shown.append(at), kept_by=told,
                problems_per_batch=batch,
            )
        )  # fmt: skip
        judged = judge_problems(
            sampler, verifier, problems(count), *SECTIONS, decode=decode, policy_version=0
        )
        metrics = evaluate(judged, problems(count), SAMPLES, LABELS, RewardConfig(**reward or {}))
    if verifier is not None:
        verifier.close()
    numbered = [[(p.index, r) for p, r in judged] for judged in batches]
    return numbered, metrics, shown, sampler.sizes


def stopped_on(out_of_time):
    """Worker: how an evaluation of two replicas ends of which one has no time after a batch."""
    sampler = Sampler(dist.get_rank(), 2)
    has_time = lambda: dist.get_rank() != out_of_time or not sampler.sizes  # noqa: E731
    with MathVerifier(1, 60) as verifier, pytest.raises(Stopped):
        judged = judge_problems(
            sampler, verifier, problems(5), *SECTIONS,
            decode=decode, policy_version=0, has_time=has_time,
        )  # fmt: skip
        evaluate(judged, problems(5), SAMPLES, LABELS, RewardConfig())
    return len(sampler.sizes)


def test_every_rank_stops_when_one_has_no_time(workers):
    # Batches of two problems, one for each replica.
    assert workers.run(2, stopped_on, 1) == [3, 1]


def test_neither_replicas_nor_ranks_nor_batches_change_the_result(workers):
    cases = {
        # (ranks, ranks of a replica, problems of a batch) -> problems of each rank and batch.
        (1, 1, None): [[[0], [1], [2], [3], [4]]],
        (1, 1, 5): [[[0, 1, 2, 3, 4]]],
        (2, 1, 5): [[[0, 1, 2]], [[3, 4]]],
        (2, 1, 3): [[[0, 1], [3]], [[2], [4]]],
        (2, 2, 4): [[[0, 1, 2, 3], [4]], [[], []]],
    }
    [(judged, (metrics, correct), *_)] = workers.run(1, judged_on, 1, 5, 5)
    judged = [responses for _, responses in judged[0]]
    for (ranks, of, batch), places in cases.items():
        results = workers.run(ranks, judged_on, of, 5, batch)
        assert [[[i for i, _ in b] for b in r[0]] for r in results] == places
        for batches, same, _, _ in results:
            assert all(responses == judged[i] for b in batches for i, responses in b)
            assert same == (metrics, correct)
    assert [[r["status"] for r in p] for p in judged[:2]] == [
        ["correct", "wrong", "wrong", "unparsable"],
        ["wrong", "wrong", "correct", "unparsable"],
    ]
    assert judged[0][3]["answer"] is None and judged[0][3]["vote"] is None
    assert judged[0][1] == {
        "sample": 1, "status": "wrong", "score": None, "answer": "101", "vote": 1,
        "num_tokens": 2, "truncated": False, "text": "Answer: 101",
    }  # fmt: skip
    # One of the first three samples of each problem is right, the last of problem 3 alone, and it
    # has no answer elsewhere: pass 1, three answers with a vote each; problem 1: 100, 101, 1.
    assert correct == [1, 1, 1, 2, 1]
    assert metrics["evaluation/avg@4"] == pytest.approx(6 / 20)
    assert metrics["evaluation/pass@4"] == 1.0
    # Problem p is right at sample -p mod 3: 0, 2, 1, 0, 2. The others say 100 + sample % 2: where
    # sample 1 is right, samples 0 and 2 say 100 twice and win (0); else all have one vote (1/3). In
    # problem 3 the right answer has two votes.
    assert metrics["evaluation/majority@4"] == pytest.approx((3 / 3 + 0 + 1) / 5)
    # Lengths 1 + p + s: mean 1 + 2 + 1.5.
    assert metrics["evaluation/response_length_mean"] == 4.5
    # Longer than 6: p + s > 5, of p in 0..4 and s in 0..3: (3,3), (4,2), (4,3).
    assert metrics["evaluation/truncated_fraction"] == 3 / 20
    # Of problems 0 and 2; 1, 3 and 4; 2 and 3; 0, 1 and 4.
    assert {name: value for name, value in metrics.items() if "/by_" in name} == pytest.approx({
        "evaluation/by_source/x/avg@4": 2 / 8,
        "evaluation/by_source/x/response_length_mean": 1 + 1 + 1.5,
        "evaluation/by_source/y/avg@4": 4 / 12,
        "evaluation/by_source/y/response_length_mean": 1 + 8 / 3 + 1.5,
        "evaluation/by_verifier/exact/avg@4": 3 / 8,
        "evaluation/by_verifier/exact/response_length_mean": 1 + 2.5 + 1.5,
        "evaluation/by_verifier/math/avg@4": 3 / 12,
        "evaluation/by_verifier/math/response_length_mean": 1 + 5 / 3 + 1.5,
    })  # fmt: skip


def test_with_scores_the_reward_is_evaluated_too(workers):
    """A verdict of mathematics has no score: here 2 if it is correct, 0 if truncated, else -1."""
    reward = {"from_score": [-1.0, 2.0], "scales": {"math": {"truncated_correct": 0.0}}}
    (_, (without, _), *_), *_ = workers.run(1, judged_on, 1, 5, 5)
    for ranks in (1, 2):
        for _, (metrics, _), *_ in workers.run(ranks, judged_on, 1, 5, 5, reward):
            rewards = {name: value for name, value in metrics.items() if "reward" in name}
            # Six are correct, of which two are truncated: the last one of problem 3, and that of
            # problem 4. So the problems' sums are -1, -1, -1, 0, -3.
            assert rewards == pytest.approx({
                "evaluation/reward_mean": -6 / 20,
                "evaluation/by_source/x/reward_mean": -2 / 8,
                "evaluation/by_source/y/reward_mean": -4 / 12,
                "evaluation/by_verifier/exact/reward_mean": -1 / 8,
                "evaluation/by_verifier/math/reward_mean": -5 / 12,
            })  # fmt: skip
            assert {n: v for n, v in metrics.items() if n not in rewards} == without


def test_batches_and_progress(workers):
    [(_, _, shown, sizes)] = workers.run(1, judged_on, 1, 5, 2)
    # Batches of 2, 2 and 1 problem of 4 samples; then evaluate's own, of one problem.
    assert sizes == [8, 8, 4] + [4] * 5
    assert shown == [(done, 20) for done in range(1, 21)]
    (_, _, shown, sizes), _ = workers.run(2, judged_on, 1, 4, 4)
    # Its own of 4 problems; evaluate's are of one problem for each replica.
    assert sizes == [8] + [4] * 2
    # Of 8 responses of its own each counts for 2.
    assert shown == [(done, 16) for done in range(2, 17, 2)]


class NeverAsked(RunningVerifier):
    """Judges nothing, as every response comes with a verdict."""

    def score(self, responses, problems):
        assert not responses
        return []


class Playing(Sampler):
    """Responses of two turns, whose environment has judged those of problem 0."""

    def respond(self, rollout, seed):
        prompt = dataclasses.replace(rollout.prompt, token_ids=(1, 2, 90))
        number = rollout.prompt.index
        verdict = [Verdict("correct"), Pending()][number]
        return dataclasses.replace(
            answered(rollout, [5, 6, 7], logprob=0.0, truncated=bool(number)), prompt=prompt,
            inserted=((2, array("i", [91, 92])),), turns=(Turn(2, 0.5), Turn(3, -0.25)),
            episode=Episode(["", "environment.max_turns"][number], False, 0.0, verdict, not number),
        )  # fmt: skip


def told(ids):
    return "".join(f"<{i}>" for i in ids)


def test_an_episodes_turns_are_kept_where_texts_are():
    kept, bare = (
        next(
            judge_problems(
                Playing(0, 1), NeverAsked(), problems(2), *SECTIONS, decode=decode,
                policy_version=0, kept_by=keeps, problems_per_batch=2,
            )
        )
        for keeps in (told, None)
    )  # fmt: skip
    (_, (won, *_)), (_, (cut, *_)) = kept
    assert won["turns"] == [
        {"action": "<5><6>", "observation": "<91><92>", "reward": 0.5, "end": 2},
        {"action": "<7>", "observation": "", "reward": -0.25, "end": 3},
    ]
    assert (won["begin"], won["earned"], won["is_paid"]) == ("<1><2><90>", 0.25, True)
    assert "cut_by" not in won and cut["cut_by"] == "environment.max_turns"
    # What the reward model is to read: everything that the policy has seen.
    assert cut["sequence"] == [1, 2, 90, 5, 6, 91, 92, 7]
    assert "sequence" not in won and "token_ids" not in cut
    for _, responses in bare:
        assert not any({"turns", "begin", "text"} & set(r) for r in responses)


class Broken(Sampler):
    """Of weights that are NaN."""

    def respond(self, rollout, seed):
        return answered(rollout, [1], logprob=math.nan)


def test_what_is_not_finite_has_no_accuracy():
    judged = judge_problems(
        Broken(0, 1), None, problems(2), *SECTIONS, decode=decode, policy_version=0
    )
    with pytest.raises(RuntimeError, match="NaN weights"):
        next(judged)
