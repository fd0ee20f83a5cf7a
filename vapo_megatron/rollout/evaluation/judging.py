"""Accuracy on held-out problems: the same code for training and for `vapo evaluate`.

Before: every rank has the same problems, and the engine has the weights. After: the first rank of
each replica has judged its share of the problems, and responses stay on the rank that sampled them;
`evaluate` then sums a few numbers per problem over ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from vapo_megatron.algorithm.group_sampling import repeat_for_group
from vapo_megatron.config import EvaluationConfig, RewardConfig, RolloutConfig
from vapo_megatron.config.metrics import METRICS, emits, metric_by
from vapo_megatron.data.labels import Labels
from vapo_megatron.data.rollout import PENDING, Prompt, Rollout
from vapo_megatron.errors import Stopped
from vapo_megatron.parallel.reduce import sum_over_world
from vapo_megatron.reward.checks import FAILED
from vapo_megatron.reward.reward_model import Pending
from vapo_megatron.reward.scoring import Judged, VerdictStream
from vapo_megatron.reward.verifier import RunningVerifier
from vapo_megatron.rollout.evaluation.statistics import (
    means,
    problem_values,
    response_reward,
    value_names,
)
from vapo_megatron.rollout.evaluation.votes import Response, count_votes
from vapo_megatron.rollout.requests import SamplingSettings
from vapo_megatron.rollout.turn_records import turn_records
from vapo_megatron.rollout.work import firsts, generate

if TYPE_CHECKING:
    from vapo_megatron.rollout.episodes import Episodes
    from vapo_megatron.rollout.vllm.engine import RolloutEngine

JudgedProblems = list[tuple[Prompt, list[Response]]]
"""Problems, each with its K responses in order."""


@emits(
    "evaluation/avg@K",
    "evaluation/pass@K",
    "evaluation/majority@K",
    "evaluation/reward_mean",
    "evaluation/response_length_mean",
    "evaluation/truncated_fraction",
    *(name for name in METRICS if name.startswith("evaluation/by_")),
)
def evaluate(
    judged: Iterable[JudgedProblems],
    problems: Sequence[Prompt],
    samples: int,
    labels: Labels,
    reward: RewardConfig,
    *,
    has_environment: bool = False,
) -> tuple[dict[str, float], list[int]]:
    """Reduce judged responses to metrics. Collective over the world.

    Args:
        judged: from judge_problems, which samples while it is iterated.
        problems: all that are judged, on any rank.
        samples: K responses of each.
        labels: of the problems.
        reward: gives a score its reward.
        has_environment: turns have rewards, too.

    Returns:
        On every rank (metrics, correct): evaluation/avg@K, pass@K, majority@K (unless a correct
        response has no vote), response_length_mean and truncated_fraction over all problems, with
        reward.from_score or an environment also reward_mean; avg@K, reward_mean and
        response_length_mean over those of each label; each problem's number of correct responses
        of K.

    Raises:
        Stopped: on every rank: one of them has no time left.
    """
    rewards = ["reward_mean"] * (reward.from_score is not None or has_environment)
    names = [*value_names(samples), *rewards]
    rows = {prompt.index: row for row, prompt in enumerate(problems)}
    table = torch.zeros(len(problems), 1 + len(names), dtype=torch.float64)
    try:
        for prompt, responses in itertools.chain.from_iterable(judged):
            row = [1.0, *problem_values(responses).values()]
            if rewards:
                name = prompt.problem.verifier or reward.verifier
                row.append(reward_mean(responses, reward, name))
            table[rows[prompt.index]] += torch.tensor(row, dtype=torch.float64)
    except Stopped:
        # The others learn of it in the same sum.
        table.fill_(-math.inf)
    # One rank has a problem's numbers, the others zeros: the sum is exact.
    count, *columns = sum_over_world(table).T.tolist()
    if -math.inf in count:
        raise Stopped
    assert count == [1.0] * len(problems), "every problem is judged on exactly one rank"

    values = [dict(zip(names, row)) for row in zip(*columns)]
    found = means(values)
    shown = [f"{what}@{samples}" for what in ("avg", "pass", "majority")]
    shown += [*rewards, "response_length_mean", "truncated_fraction"]
    metrics = {f"evaluation/{name}": found[name] for name in shown if name in found}
    by_index = {prompt.index: value for prompt, value in zip(problems, values)}
    for kind in labels.several:
        for name, some in labels.by_name(kind, by_index).items():
            of_name = means(some)
            for what in (f"avg@{samples}", *rewards, "response_length_mean"):
                metrics[metric_by("evaluation", kind, name, what)] = of_name[what]
    return metrics, [round(samples * value[f"avg@{samples}"]) for value in values]


def reward_mean(responses: Sequence[Response], reward: RewardConfig, verifier: str) -> float:
    """Return the mean reward of a problem's responses, without a punishment of length."""
    rewards = [response_reward(r, reward, verifier) for r in responses]
    return math.fsum(rewards) / len(rewards)


def sampling_settings(evaluation: EvaluationConfig, max_response_tokens: int) -> SamplingSettings:
    """Return how evaluation samples. ConfigError: vLLM does not support it."""
    return SamplingSettings(
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        top_k=evaluation.top_k,
        max_response_tokens=max_response_tokens,
        seed_role="evaluation",
        whole_groups=True,
    )


def judge_problems(
    engine: RolloutEngine,
    verifier: RunningVerifier | None,
    problems: Sequence[Prompt],
    evaluation: EvaluationConfig,
    rollout: RolloutConfig,
    *,
    decode: Callable[[Sequence[Sequence[int]]], list[str]],
    policy_version: int,
    on_progress: Callable[[int, int], None] | None = None,
    has_time: Callable[[], bool] | None = None,
    kept_by: Callable[[Sequence[int]], str] | None = None,
    problems_per_batch: int | None = None,
    episodes: Episodes | None = None,
    keeps_tokens: bool = False,
) -> Iterator[JudgedProblems]:
    """Sample, judge and count votes, batch by batch; memory does not grow with the problems.

    The ranks of a replica iterate together; replicas do not wait for each other. A response depends
    only on its problem and sample number: not on the number of replicas, other problems or the
    training step, so that evaluations of a run differ only by the weights.

    Args:
        engine: this rank's engine.
        verifier: on the first rank of each replica, None elsewhere.
        problems: the same on every rank.
        evaluation: sampling parameters.
        rollout: longest response, and how many one replica samples at once.
        decode: see VerdictStream.
        policy_version: of the engine's weights.
        on_progress: called with (done, total) responses, extrapolated from this replica to all.
        has_time: see RolloutEngine.run.
        kept_by: keep responses' texts, and episodes' turns as it decodes them; None: neither.
        problems_per_batch: over all replicas; None: enough for two full batches of each engine.
        episodes: see generate.
        keeps_tokens: keep responses' token ids, too.

    Yields:
        Per batch this replica's problems, in order, on its first rank; an empty list elsewhere.
    """
    samples = evaluation.samples
    sampling = sampling_settings(evaluation, rollout.max_response_tokens)
    if problems_per_batch is None:
        share = max(1, 2 * rollout.max_num_sequences // samples)
        problems_per_batch = share * engine.num_replicas
    for start in range(0, len(problems), problems_per_batch):
        part = problems[start : start + problems_per_batch]

        def show(done: int, total: int, start: int = start, size: int = len(part)) -> None:
            if on_progress is not None:
                on_progress(round((start + size * done / total) * samples), len(problems) * samples)

        sizes = [samples] * len(part)
        with VerdictStream(verifier, decode, firsts(sizes)) as stream:
            rollouts = generate(
                engine, repeat_for_group(list(part), samples), sizes, 0, sampling, policy_version,
                show, has_time, on_finished=stream.submit, episodes=episodes,
            )  # fmt: skip
            if not all(math.isfinite(x) for rollout in rollouts for x in rollout.logprobs or ()):
                raise RuntimeError("a log-probability is not finite; look for NaN weights")
            found = stream.judged(rollouts)
        if verifier is None:
            yield []
            continue
        responses = [
            _response(r, judged, kept_by, keeps_tokens=keeps_tokens)
            for r, judged in zip(rollouts, found)
        ]
        yield _voted(verifier, rollouts, responses, samples)


def _voted(
    verifier: RunningVerifier,
    rollouts: Sequence[Rollout],
    responses: Sequence[Response],
    samples: int,
) -> JudgedProblems:
    """Return the responses by problem, with their votes."""
    groups = [list(responses[i : i + samples]) for i in range(0, len(responses), samples)]
    prompts = [rollout.prompt for rollout in rollouts[::samples]]
    votes_of = count_votes(verifier, [prompt.problem for prompt in prompts], groups)
    for group, votes in zip(groups, votes_of):
        assert [r["sample"] for r in group] == list(range(samples)), "each group is complete"
        for response, vote in zip(group, votes):
            response["vote"] = vote
    return list(zip(prompts, groups))


def _response(
    rollout: Rollout,
    judged: Judged,
    kept_by: Callable[[Sequence[int]], str] | None,
    *,
    keeps_tokens: bool,
) -> Response:
    is_pending = isinstance(judged.verdict, Pending)
    return {
        "sample": rollout.sample,
        "status": PENDING if is_pending else judged.verdict.status,
        "score": judged.verdict.score,
        "answer": judged.verdict.answer,
        "vote": None,
        "num_tokens": len(rollout.token_ids),
        "truncated": rollout.truncated,
        **({"earned": sum(t.reward for t in rollout.turns)} if rollout.turns else {}),
        **({"is_paid": True} if rollout.is_paid else {}),
        **({} if kept_by is None else {"text": judged.text}),
        **({"note": judged.verdict.note} if judged.verdict.status in FAILED else {}),
        **_turns(rollout, kept_by),
        **(_unread(rollout) if is_pending else {}),
        **({"token_ids": rollout.token_ids.tolist()} if keeps_tokens else {}),
    }


def _turns(rollout: Rollout, decode: Callable[[Sequence[int]], str] | None) -> Response:
    """Return what is kept of an episode, as in a run's rollouts/."""
    cut = rollout.episode.cut if rollout.episode else ""
    found: Response = {"cut_by": cut} if cut else {}
    if rollout.turns and decode is not None:
        found["begin"] = decode(rollout.prompt.token_ids)
        found["turns"] = turn_records(rollout, decode)
    return found


def _unread(rollout: Rollout) -> Response:
    """Return the tokens that the reward model is still to read."""
    if rollout.turns:
        # With what the environment has said, first and later.
        return {"sequence": rollout.sequence.tolist()}
    return {"token_ids": rollout.token_ids.tolist()}
