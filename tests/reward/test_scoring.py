"""From rollouts to scored rollouts, while others are still sampled.

Not exercised: which rank holds the verifier.
"""

import dataclasses
import math
import threading
import time
from array import array

import pytest
import torch

from vapo_megatron.config import RewardConfig, RolloutConfig
from vapo_megatron.data.batch import StepSummary
from vapo_megatron.data.rollout import Prompt, Rollout
from vapo_megatron.errors import ConfigError, Stopped
from vapo_megatron.reward.checks import (
    VerdictsFailed,
    check_failures,
    check_verdicts,
    check_whole_groups,
)
from vapo_megatron.reward.math_verifier import MathVerifier
from vapo_megatron.reward.scoring import (
    LARGEST_BATCH,
    VerdictStream,
    score_rollouts,
    with_scores,
)
from vapo_megatron.reward.verifier import Verdict
from vapo_megatron.reward.verifiers import Verifiers

TEXTS: list[str] = []


def decode(responses):
    """The texts of responses, whose tokens are all their text's number."""
    return [TEXTS[token_ids[0]] for token_ids in responses]


def rollout(text, answer, position, length=4, truncated=False, metadata=None):
    # The prompt holds the right answer in every format: only the response may count.
    prompt = Prompt(
        0, rf"Answer: {answer} \boxed{{{answer}}} #### {answer}", (1, 2), answer, metadata or {}
    )
    tokens, logprobs = array("i", [len(TEXTS)] * length), array("f", [0.0] * length)
    TEXTS.append(text)
    return Rollout(prompt, 0, position, tokens, logprobs, truncated, 0)


def test_the_response_alone_is_judged_and_the_verdict_stays_apart_from_the_reward():
    reward = RewardConfig(truncated_correct=-0.5, overlong_buffer_tokens=4, overlong_penalty=2.0)
    rollouts = [
        rollout("Answer: 1/2", "0.5", 9),
        rollout("Answer: 3", "0.5", 8),
        rollout("nothing", "7", 7),
        rollout("Answer: 7", "7", 6, length=10, truncated=True),
        rollout("Answer: 7", "7", 5, length=9),
    ]
    with MathVerifier(1, 60) as verifier, VerdictStream(verifier, decode) as stream:
        for one in reversed(rollouts):
            stream.submit(one)
        scored = score_rollouts(stream, rollouts, reward, 10)
    assert [s.rollout.position for s in scored] == [9, 8, 7, 6, 5]
    assert [s.text[-3:] for s in scored] == ["1/2", ": 3", "ing", ": 7", ": 7"]
    assert [s.status for s in scored] == ["correct", "wrong", "unparsable", "correct", "correct"]
    assert [s.is_correct for s in scored] == [True, False, False, True, True]
    # Punishment of 10 tokens: -1 * 2; of 9: (6 - 9)/4 * 2 = -1.5.
    assert [s.reward for s in scored] == [1.0, -1.0, -1.0, -0.5 - 2.0, 1.0 - 1.5]


def test_what_the_reward_model_judges_has_no_verdict_until_its_score_is_there():
    reward = RewardConfig(verifiers={"taste": {"use": "reward_model"}}, num_workers=1)
    taste = {"verifier": "taste"}
    rollouts = [
        rollout("Answer: 3", "3", 2),
        rollout("fine", "", 0, metadata=taste),
        rollout("bad", "", 1, length=9, truncated=True, metadata=taste),
        rollout("odd", "", 3, metadata=taste),
    ]
    with Verifiers(reward) as verifiers, VerdictStream(verifiers, decode) as stream:
        for one in rollouts:
            stream.submit(one)
        scored = score_rollouts(stream, rollouts, reward, 10)
    assert statuses(scored) == ["correct", "pending", "pending", "pending"]
    assert [s.text for s in scored[1:]] == ["fine", "bad", "odd"]
    assert scored[0].reward == 1 and all(math.isnan(s.reward) for s in scored[1:])
    # By position; what is not pending has no score.
    summary = StepSummary(
        prompt_lengths=torch.full((4,), 2), response_lengths=torch.tensor([4, 9, 4, 4]),
        statuses=torch.tensor([5, 5, 0, 5]), truncated=torch.tensor([False, True, False, False]),
        rewards=torch.tensor([math.nan, math.nan, 1, math.nan]),
        prompt_indices=torch.zeros(4).long(), firsts=torch.arange(4), sources=torch.zeros(4).long(),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="has scored"):
        check_verdicts(summary, reward, scored, None)
    scores = torch.tensor([0.5, -0.5, 9.0, math.inf])
    after, found = with_scores(summary, scored, scores, reward, 10, {})
    # Without from_score a score above 0 is correct, and the three values are the rewards.
    assert [(s.status, s.reward, s.score) for s in found] == [
        ("correct", 1.0, None), ("correct", 1.0, 0.5), ("wrong", -1.0, -0.5), ("failed", -1.0, None)
    ]  # fmt: skip
    assert found[3].note == "the reward model's score is inf"
    assert after.statuses.tolist() == [0, 1, 0, 4]
    assert after.rewards.tolist() == [1, -1, 1, -1]
    given = [0.5, -0.5, math.nan, math.nan]
    assert after.scores.tolist() == pytest.approx(given, nan_ok=True)
    check_verdicts(after, reward, found, None)
    strict = RewardConfig(max_failed_fraction=0.2, timeout_seconds=0.5)
    words = "of 4: more than reward.max_failed_fraction=0.2 allows; the first: the verifier taste "
    words += "on problem 0: the reward model's score is inf; correct .*timeout_seconds=0.5, "
    with pytest.raises(VerdictsFailed, match=words):
        check_verdicts(after, strict, found[::-1], None)
    # With it, the score is the reward of a truncated response, too: 9 of 10 tokens, 3/4 too many.
    shaped = RewardConfig(from_score=[-1, 1], correct_from=0.75, overlong_buffer_tokens=4)
    after, found = with_scores(summary, scored, scores, shaped, 10, {})
    assert after.statuses.tolist() == [1, 1, 0, 4]
    assert after.rewards.tolist() == [0.5, -0.5 - 0.75, 1, -1]
    assert [s.reward for s in found] == [1.0, 0.5, -1.25, -1.0]
    # The summary of a rank that sampled nothing is the same.
    elsewhere, none = with_scores(summary, [], scores, shaped, 10, {})
    assert torch.equal(elsewhere.rewards, after.rewards) and none == []


def test_failed_and_timed_out_verdicts_count_together():
    counts = {"correct": 4, "wrong": 2, "unparsable": 1, "failed": 1, "timed_out": 2}
    check_failures(counts, RewardConfig(max_failed_fraction=0.3), "")
    said = "1 verdicts failed and 2 timed out, of 10: more than .*; the first: it slept; correct"
    with pytest.raises(VerdictsFailed, match=said):
        check_failures(counts, RewardConfig(max_failed_fraction=0.29), "it slept")


def test_where_nothing_is_kept_nothing_is_scored():
    with VerdictStream(None, decode) as stream:
        assert score_rollouts(stream, [], RewardConfig(), 10) == []


class SlowVerifier:
    """Takes its time for each response, which is correct where it repeats the answer."""

    def __init__(self, seconds=0.0):
        self.seconds, self.batches, self.forgotten = seconds, [], 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def score(self, responses, problems):
        self.batches.append(list(responses))
        self.may_go_on.wait(60)
        time.sleep(self.seconds * len(responses))
        right = (r == p.answer for r, p in zip(responses, problems))
        return [Verdict("correct" if is_right else "wrong") for is_right in right]

    def forget(self):
        self.forgotten += 1


def statuses(scored):
    return [s.status for s in scored]


def test_the_wait_after_the_last_response_is_for_its_verdict_alone():
    """Responses every 0.15 s, verdicts of 0.1 s: 10 of them at the end would take a second."""
    verifier = SlowVerifier(0.1)
    rollouts = [rollout(str(i % 3), "1", i) for i in range(10)]
    with VerdictStream(verifier, decode) as stream:
        for one in rollouts:
            time.sleep(0.15)
            stream.submit(one)
        began = time.monotonic()
        scored = score_rollouts(stream, rollouts, RewardConfig(), 10)
        waited = time.monotonic() - began
    assert statuses(scored) == ["correct" if i % 3 == 1 else "wrong" for i in range(10)]
    assert waited < 0.5
    assert sorted(text for batch in verifier.batches for text in batch) == sorted("0120120120")
    assert verifier.forgotten == 1


def test_a_verdict_is_there_before_the_next_response():
    """Fails by its time limit where the verifier starts only after the last one."""
    verifier = SlowVerifier()
    rollouts = [rollout("1", "1", i) for i in range(5)]
    with VerdictStream(verifier, decode) as stream:
        for one in rollouts:
            stream.submit(one)
            stream._calls[-1].result(timeout=60)
        assert verifier.batches == [["1"]] * 5


def test_what_waits_is_judged_together_in_bounded_batches():
    verifier, count = SlowVerifier(), 2 * LARGEST_BATCH + 9
    rollouts = [rollout(str(i), str(i - i % 2), i) for i in range(count)]
    verifier.may_go_on.clear()
    with VerdictStream(verifier, decode) as stream:
        for one in reversed(rollouts):
            stream.submit(one)
        while not verifier.batches:
            time.sleep(0.01)
        verifier.may_go_on.set()
        scored = score_rollouts(stream, rollouts, RewardConfig(), 10)
    assert statuses(scored) == ["wrong" if i % 2 else "correct" for i in range(count)]
    assert len(verifier.batches) <= 4 and max(map(len, verifier.batches)) == LARGEST_BATCH


def test_a_verifier_that_sees_groups_is_given_each_whole_and_in_order():
    def ranks(responses, answer):
        assert answer == "gold"
        return [Verdict("wrong", metrics={"rank": i, "size": len(responses)})
                for i, _ in enumerate(responses)]  # fmt: skip

    reward = RewardConfig(num_workers=1, timeout_seconds=60)
    # Groups of three and five.
    sizes, samples = {0: 3, 3: 5}, [*range(3), *range(5)]
    rollouts = [
        dataclasses.replace(rollout(f"{i}", "gold", i), sample=sample)
        for i, sample in enumerate(samples)
    ]
    single = rollout("Answer: 7", "7", 8, metadata={"verifier": "math"})
    with Verifiers(reward, ranks) as verifiers, VerdictStream(verifiers, decode, sizes) as stream:
        for one in [*rollouts[::-2], single, *rollouts[::2]]:
            stream.submit(one)
        scored = score_rollouts(stream, [*rollouts, single], reward, 10)
    # Both groups have the same problem, and are two all the same.
    assert [s.metrics for s in scored[:8]] == [
        {"rank": sample, "size": 3 if i < 3 else 5} for i, sample in enumerate(samples)
    ]
    assert scored[8].status == "correct" and scored[8].metrics == {}
    with pytest.raises(ConfigError, match="rollout.carry_over_groups=2 ends the responses"):
        check_whole_groups(RolloutConfig(carry_over_groups=2), sees_groups=True)


def test_a_stopped_step_does_not_wait_and_judges_no_more():
    verifier = SlowVerifier()
    verifier.may_go_on.clear()
    with pytest.raises(Stopped), VerdictStream(verifier, decode) as stream:
        stream.submit(rollout("first", "1", 0))
        while not verifier.batches:
            time.sleep(0.01)
        stream.submit(rollout("second", "1", 1))
        raise Stopped
    assert not stream._calls[0].done()
    verifier.may_go_on.set()
    stream._calls[0].result(timeout=60)
    assert stream._calls[1].cancelled() and verifier.batches == [["first"]]


def test_the_verifiers_error_reaches_the_step():
    class Broken(SlowVerifier):
        def score(self, responses, problems):
            raise RuntimeError("no start")

    with pytest.raises(RuntimeError, match="no start"), VerdictStream(Broken(), decode) as stream:
        stream.submit(rollout("1", "1", 0))
        stream.judged([rollout("1", "1", 0)])


def test_text_is_decoded_while_the_next_response_is_sampled():
    """Fails by its time limit where `submit`, which vLLM's loop calls, decodes by itself."""
    submitted = threading.Event()

    def slowly(responses):
        assert submitted.wait(20)
        return decode(responses)

    with VerdictStream(SlowVerifier(), slowly) as stream:
        rollouts = [rollout("1", "1", i) for i in range(3)]
        for one in rollouts:
            stream.submit(one)
        submitted.set()
        assert [judged.text for judged in stream.judged(rollouts)] == ["1"] * 3
