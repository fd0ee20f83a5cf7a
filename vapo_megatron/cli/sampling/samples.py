"""Samples and judges the problems missing from a samples file, under torchrun or alone.

Every rank holds a shard of a vLLM replica. The first rank of each replica writes its samples, and
rank 0 merges them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.cli.sampling.engine import VERSION, build_engine, distributed
from vapo_megatron.cli.sampling.inputs import Evaluation
from vapo_megatron.config import RewardConfig, RolloutConfig, VapoConfig
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.data.rollout import Prompt
from vapo_megatron.data.storage import append
from vapo_megatron.errors import DataError, UserError, tell
from vapo_megatron.parallel.reduce import any_rank, gather_objects, sum_over_world
from vapo_megatron.reward.checks import FAILED, check_failures, failure, start_verifiers
from vapo_megatron.rollout.episodes import start_episodes
from vapo_megatron.rollout.evaluation.judging import JudgedProblems, judge_problems
from vapo_megatron.rollout.evaluation.samples_file import (
    begin_parts,
    collect,
    lock_file,
    part_of,
)
from vapo_megatron.rollout.tokenizer import decode_responses

T = TypeVar("T")

SampleProblems = Callable[..., Iterator[JudgedProblems]]
"""judge_problems, or what has its arguments and result."""


def check_out(out: Path, evaluation: Evaluation) -> None:
    """Refuse the samples of another evaluation; begin those of dated prompts, for all processes.

    Raises:
        DataError: names the file and what differs, or says that it is being written.
    """
    if out.exists() or evaluation.inputs.date is not None:
        with lock_file(out):
            collect(out, evaluation.header)


def sample_missing(
    evaluation: Evaluation,
    config: VapoConfig,
    out: Path,
    problems: Sequence[Prompt],
    problems_per_batch: int | None,
    finish: Callable[[], T],
    score_pending: Callable[[], None] | None = None,
    sample: SampleProblems = judge_problems,
) -> T | None:
    """Sample and judge the problems that are missing in `out`. Collective.

    Args:
        evaluation: from check.
        config: from evaluation_config.
        out: see samples_file.
        problems: some or all of evaluation.dataset.
        problems_per_batch: problems sampled together and then written; None: enough for two
            responses per sequence that the replicas sample at once.
        finish: called on rank 0 once `out` has all of them, while it is locked.
        score_pending: called on every rank before, without vLLM; None: the reward model may judge
            no row.
        sample: samples and judges.

    Returns:
        The result of finish on rank 0, None elsewhere.

    Raises:
        UserError: on every rank; VerdictsFailed where the verdicts of a batch failed, which is not
            written, and finish's own on rank 0.
    """
    with distributed(config) as stack:
        tp_size = config.rollout.tensor_model_parallel_size
        missing = _begin(out, evaluation.header, problems, tp_size, stack)
        if missing:
            _tell_limit(evaluation.rollout, config.rollout)
            config = config.model_copy(update={"rollout": evaluation.rollout})
            can_wait = score_pending is not None
            _sample(evaluation, config, out, missing, problems_per_batch, sample, can_wait=can_wait)
        if score_pending is not None:
            score_pending()
        return finish() if dist.get_rank() == 0 else None


def _begin(
    out: Path,
    header: dict[str, Any],
    problems: Sequence[Prompt],
    tp_size: int,
    stack: contextlib.ExitStack,
) -> list[Prompt]:
    """Create or resume the file: rank 0 locks it and creates each replica's part.

    Returns:
        The problems that it lacks.

    Raises:
        DataError: on every rank.
    """
    done: set[int] = set()
    mistake = None
    if dist.get_rank() == 0:
        try:
            stack.enter_context(lock_file(out))
            done = set(collect(out, header))
            if any(p.index not in done for p in problems):
                begin_parts(out, header, dist.get_world_size() // tp_size)
        except (UserError, OSError) as error:
            mistake = str(error)
    done, mistake = gather_objects((done, mistake))[0]
    if any_rank(mistake is None and not out.is_file()):
        mistake = (
            f"--out={out} is missing on a node; give a file on a file system that all nodes share"
        )
    if mistake is not None:
        raise DataError(mistake)
    return [p for p in problems if p.index not in done]


def _tell_limit(own: RolloutConfig, default: RolloutConfig) -> None:
    """Print the limit on responses where the prompts leave less than the default one."""
    if own.max_response_tokens < default.max_response_tokens and dist.get_rank() == 0:
        tell(
            f"responses have at most {own.max_response_tokens} tokens, which the longest prompt of "
            f"{own.max_prompt_tokens} leaves of the model's positions; "
            "rollout.max_response_tokens sets another limit"
        )


def _sample(
    evaluation: Evaluation,
    config: VapoConfig,
    out: Path,
    problems: Sequence[Prompt],
    problems_per_batch: int | None,
    sample: SampleProblems,
    *,
    can_wait: bool,
) -> None:
    """Sample batch by batch; each replica writes its own part, complete on return. Collective.

    The ground truths of all problems, not only of `problems`, are checked first. Verdicts may be
    left to the reward model where they can_wait.
    """
    with contextlib.ExitStack() as stack:
        # Only training data may leave verdicts to the reward model.
        training, held_out = (evaluation.dataset, None) if can_wait else (None, evaluation.dataset)
        verifier = start_verifiers(
            config.reward, training, held_out, config.rollout.tensor_model_parallel_size,
            reward_hf_path=config.model.reward_hf_path, skip_unusable=config.data.skip_unusable,
        )  # fmt: skip
        if verifier is not None:
            stack.callback(verifier.close)
        # Read again: hybrid has chosen verifiers, and rows may be left out now.
        wanted = {p.index for p in problems}
        if not (problems := [p for p in evaluation.dataset.problems if p.index in wanted]):
            return
        episodes = start_episodes(
            config.environment, config.rollout, config.reward, evaluation.inputs,
            has_players=verifier is not None,
        )  # fmt: skip
        if episodes is not None:
            stack.callback(episodes.close)
        engine = build_engine(evaluation, config)
        stack.callback(engine.shutdown)
        probe, reflects = evaluation.probe, None
        if probe is not None and verifier is not None:
            reflects = probe.start(config.reward)
            stack.callback(reflects.close if reflects else lambda: None)
        tokenizer = evaluation.inputs.tokenizer
        bar = stack.enter_context(ProgressBar("responses", after_seconds=0.0))
        part = stack.enter_context(part_of(out, engine.replica).open("ab"))
        written = 0
        for judged in sample(
            engine, verifier, problems, config.evaluation, config.rollout,
            decode=partial(decode_responses, tokenizer), policy_version=VERSION,
            on_progress=bar.show, problems_per_batch=problems_per_batch,
            kept_by=partial(tokenizer.decode, clean_up_tokenization_spaces=False),
            episodes=episodes,
        ):  # fmt: skip
            # Only the first rank of a replica has what was judged.
            if judged:
                _check(judged, config.reward, evaluation.dataset)
                if probe is not None and probe.asks_reflection:
                    probe.add_reflects(judged, reflects)
                append(part, [_line(*pair, config.reward) for pair in judged])
            written += len(judged)
    # A replica that lost problems must not go unnoticed: parts are merged afterwards.
    total = int(sum_over_world(torch.tensor(float(written), dtype=torch.float64)))
    assert total == len(problems), f"{total} of {len(problems)} problems were written"


def _check(judged: JudgedProblems, reward: RewardConfig, dataset: PromptDataset) -> None:
    """Refuse a batch whose verdicts failed; see check_failures."""
    statuses = Counter(r["status"] for _, responses in judged for r in responses)
    failed = (
        failure(prompt, r["status"], r["note"], reward, dataset)
        for prompt, responses in judged for r in responses if r["status"] in FAILED
    )  # fmt: skip
    check_failures(statuses, reward, next(failed, ""))


def _line(
    prompt: Prompt, responses: Sequence[dict[str, Any]], reward: RewardConfig
) -> dict[str, Any]:
    """Return a problem's line; see samples_file."""
    return {
        "prompt_index": prompt.index, "prompt": prompt.text, "answer": prompt.answer,
        "verifier": prompt.problem.verifier or reward.verifier, "responses": responses,
    }  # fmt: skip
