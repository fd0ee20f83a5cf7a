"""Accuracy on held-out problems: the same code for training and for tools/evaluate.py.

Before: every rank has the same problems, the sampler holds the weights. After: every replica has
sampled its share, its first rank has judged it, and the world's first rank has all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from vapo_megatron.algorithm.group_sampling import repeat_for_group
from vapo_megatron.batch import Prompt, ScoredRollout
from vapo_megatron.config import VapoConfig
from vapo_megatron.evaluation_statistics import means, problem_values
from vapo_megatron.reward.extraction import MAX_ANSWER_CHARACTERS, final_answer, ground_truth
from vapo_megatron.reward.math_verifier import MathVerifier
from vapo_megatron.reward.scoring import score_rollouts
from vapo_megatron.rollout.requests import SamplingSettings

Response = dict[str, Any]
"""One judged sample: `sample`, `status`, `answer` (as the verifier compared it, or None), `vote`
(see count_votes), `num_tokens`, `truncated`, and `text` where it is kept."""


def evaluate(
    engine: Any,
    verifier: MathVerifier | None,
    config: VapoConfig,
    problems: Sequence[Prompt],
    *,
    policy_version: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Sample `evaluation.samples` responses per problem and judge them.

    The seeds do not depend on the training step: every evaluation of a run draws the same noise, so
    that differences come from the weights.

    Returns:
        evaluation/avg@K, pass@K, majority@K, response_length_mean and truncated_fraction, over all
        problems, on every rank.
    """
    judged = judge_problems(
        engine, verifier, config, problems, policy_version=policy_version, on_progress=on_progress
    )
    found: list[dict[str, float]] = [{}]
    if judged is not None:
        values = means([problem_values(responses) for responses in judged])
        samples = config.evaluation.samples
        names = [f"{what}@{samples}" for what in ("avg", "pass", "majority")]
        names += ["response_length_mean", "truncated_fraction"]
        found = [{f"evaluation/{name}": values[name] for name in names}]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def sampling_settings(config: VapoConfig) -> SamplingSettings:
    """Return how evaluation samples."""
    return SamplingSettings(
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p,
        top_k=config.evaluation.top_k,
        max_response_tokens=config.rollout.max_response_tokens,
        seed_role="evaluation",
    )


def judge_problems(
    engine: Any,
    verifier: MathVerifier | None,
    config: VapoConfig,
    problems: Sequence[Prompt],
    *,
    policy_version: int,
    on_progress: Callable[[int, int], None] | None = None,
    keep_text: bool = False,
    group: Any = None,
) -> list[list[Response]] | None:
    """Sample, judge and count votes. Collective over the world.

    What a response is depends on its problem and sample number alone: neither on the number of
    replicas, nor on which other problems are asked in the same call.

    Args:
        engine: this rank's sampler.
        verifier: on the first rank of each replica, None elsewhere.
        config: evaluation, rollout and reward are used.
        problems: the same on every rank.
        policy_version: of the sampler's weights.
        on_progress: called with (done, total) of this replica's responses.
        keep_text: responses hold their text.
        group: over which they are gathered; None: the default group.

    Returns:
        The K responses of each problem, in order, on the world's first rank; None elsewhere.
    """
    samples, sampling = config.evaluation.samples, sampling_settings(config)
    asked = repeat_for_group(list(problems), samples)
    rollouts = engine.generate(asked, samples, 0, sampling, policy_version, on_progress=on_progress)
    scored = score_rollouts(verifier, rollouts, config.reward, sampling.max_response_tokens)
    local = {s.rollout.position: _response(s, keep_text) for s in scored}
    is_main = dist.get_rank() == 0
    everyone: list[Any] | None = [None] * dist.get_world_size() if is_main else None
    dist.gather_object(local, everyone, dst=0, group=group)
    if everyone is None:
        return None
    assert verifier is not None, "the world's first rank is the first of its replica"
    found = {position: response for part in everyone for position, response in part.items()}
    assert sorted(found) == list(range(len(asked))), "every position was sampled and judged once"
    ordered = [found[position] for position in range(len(asked))]
    judged = [ordered[i : i + samples] for i in range(0, len(ordered), samples)]
    for responses, votes in zip(judged, count_votes(verifier, judged)):
        for response, vote in zip(responses, votes):
            response["vote"] = vote
    return judged


def _response(scored: ScoredRollout, keep_text: bool) -> Response:
    rollout = scored.rollout
    answer = final_answer(rollout.text)
    if answer is not None and len(answer) > MAX_ANSWER_CHARACTERS:
        answer = None
    response = {
        "sample": rollout.sample,
        "status": scored.status,
        "answer": answer,
        "vote": None,
        "num_tokens": len(rollout.token_ids),
        "truncated": rollout.truncated,
    }
    return {**response, "text": rollout.text} if keep_text else response


def count_votes(
    verifier: MathVerifier, judged: Sequence[Sequence[Response]]
) -> list[list[int | None]]:
    """Return the class of equal answers that each response's answer belongs to; None without one.

    Correct answers are one class. Others are equal when their texts are, or when the verifier finds
    the later one right with the earlier one as the ground truth; it is asked only where that could
    change which class has the most votes. Answers that it could not judge have their text alone.

    Args:
        verifier: compares answers.
        judged: the responses of each problem.

    Returns:
        For each problem and response the number of its class, from 0 in the order of appearance.
    """
    doubtful = [_wrong_answers(responses) if _is_open(responses) else [] for responses in judged]
    pairs = [
        (earlier, later)
        for answers in doubtful
        for i, later in enumerate(answers)
        for earlier in answers[:i]
    ]
    equal = _equal_pairs(verifier, list(dict.fromkeys(pairs)))
    return [_classes(responses, equal) for responses in judged]


def _is_open(responses: Sequence[Response]) -> bool:
    """Could the classes of wrong answers decide whether the majority is correct?"""
    correct = sum(r["status"] == "correct" for r in responses)
    wrong = [r["answer"] for r in responses if r["status"] != "correct" and r["answer"] is not None]
    largest = max(map(wrong.count, wrong), default=0)
    return largest <= correct <= len(wrong) and correct > 0


def _wrong_answers(responses: Sequence[Response]) -> list[str]:
    """Different wrong answers that can be compared, in the order of appearance."""
    found = dict.fromkeys(r["answer"] for r in responses if r["status"] == "wrong")
    return [a for a in found if ground_truth(a) == a and final_answer(_boxed(a)) == a]


def _equal_pairs(verifier: MathVerifier, pairs: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return those pairs (earlier, later) whose answers the verifier finds equal."""
    earlier = list(dict.fromkeys(e for e, _ in pairs))
    unreadable = {earlier[i] for i in verifier.unparsable_answers(earlier)}
    asked = [(e, a) for e, a in pairs if e not in unreadable]
    verdicts = verifier.score([_boxed(a) for _, a in asked], [e for e, _ in asked])
    return {pair for pair, verdict in zip(asked, verdicts) if verdict.is_correct}


def _classes(responses: Sequence[Response], equal: set[tuple[str, str]]) -> list[int | None]:
    first_of_class: list[str | None] = []
    """The answer with which a class began; None for the class of correct ones."""
    votes: list[int | None] = []
    for response in responses:
        answer = response["answer"]
        if answer is None:
            votes.append(None)
            continue
        name = None if response["status"] == "correct" else answer
        fitting = (
            i
            for i, first in enumerate(first_of_class)
            if first == name or (first is not None and name is not None and (first, name) in equal)
        )
        vote = next(fitting, len(first_of_class))
        if vote == len(first_of_class):
            first_of_class.append(name)
        votes.append(vote)
    return votes


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"
