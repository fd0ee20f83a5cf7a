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
from vapo_megatron.cli.sampling.inputs import Evaluation
from vapo_megatron.config import VapoConfig
from vapo_megatron.data.rollout import Prompt
from vapo_megatron.data.storage import append
from vapo_megatron.errors import DataError, UserError, tell
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.environment import check_processes
from vapo_megatron.parallel.reduce import any_rank, gather_objects, sum_over_world
from vapo_megatron.reward.checks import FAILED, check_failures, failure, start_verifiers
from vapo_megatron.rollout.episodes import start_episodes
from vapo_megatron.rollout.evaluation.judging import judge_problems
from vapo_megatron.rollout.evaluation.samples_file import (
    begin_parts,
    collect,
    lock_file,
    part_of,
)
from vapo_megatron.rollout.tokenizer import decode_responses
from vapo_megatron.weights.hf_reader import HfReader

T = TypeVar("T")

VERSION = 0
"""Of vLLM's weights, which never change here."""


def check_out(out: Path, evaluation: Evaluation) -> None:
    """Refuse the samples of another evaluation; begin those of dated prompts, for all processes.

    Raises:
        DataError: names the file and what differs, or says that it is being written.
    """
    if out.exists() or evaluation.inputs.date is not None:
        with lock_file(out):
            collect(out, evaluation.header)


@contextlib.contextmanager
def distributed(config: VapoConfig) -> Iterator[contextlib.ExitStack]:
    """Be one of torchrun's processes, or the only one; yield what ends with that. Collective."""
    check_processes(config.parallel.world_size, config.rollout.num_processes)
    backend.initialize_distributed(config.parallel.timeout_seconds)
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        yield stack


def sample_missing(
    evaluation: Evaluation,
    config: VapoConfig,
    out: Path,
    problems: Sequence[Prompt],
    problems_per_batch: int | None,
    finish: Callable[[], T],
    score_pending: Callable[[], None] | None = None,
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

    Returns:
        The result of finish on rank 0, None elsewhere.

    Raises:
        UserError: on every rank; VerdictsFailed where the verdicts of a batch failed, which is not
            written, and finish's own on rank 0.
    """
    with distributed(config) as stack:
        tp_size = config.rollout.tensor_model_parallel_size
        missing = _begin(out, evaluation.header, problems, tp_size, stack)
        limit, default = evaluation.rollout.max_response_tokens, config.rollout.max_response_tokens
        if missing and limit < default and dist.get_rank() == 0:
            tell(
                f"responses have at most {limit} tokens, which the longest prompt of "
                f"{evaluation.rollout.max_prompt_tokens} leaves of the model's positions; "
                "rollout.max_response_tokens sets another limit"
            )
        config = config.model_copy(update={"rollout": evaluation.rollout})
        if missing:
            can_wait = score_pending is not None
            _sample(evaluation, config, out, missing, problems_per_batch, can_wait=can_wait)
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
    problem = None
    if dist.get_rank() == 0:
        try:
            stack.enter_context(lock_file(out))
            done = set(collect(out, header))
            if any(p.index not in done for p in problems):
                begin_parts(out, header, dist.get_world_size() // tp_size)
        except (UserError, OSError) as error:
            problem = str(error)
    done, problem = gather_objects((done, problem))[0]
    if any_rank(problem is None and not out.is_file()):
        problem = (
            f"--out={out} is missing on a node; give a file on a file system that all nodes share"
        )
    if problem is not None:
        raise DataError(problem)
    return [p for p in problems if p.index not in done]


def _sample(
    evaluation: Evaluation,
    config: VapoConfig,
    out: Path,
    problems: Sequence[Prompt],
    problems_per_batch: int | None,
    *,
    can_wait: bool,
) -> None:
    """Sample batch by batch; each replica writes its own part. All are complete on return.

    The ground truths of all problems, not only of `problems`, are checked first. Verdicts may be
    left to the reward model where they can_wait.
    """
    tp_size = config.rollout.tensor_model_parallel_size
    written = 0
    with contextlib.ExitStack() as stack:
        # Only training data may leave verdicts to the reward model.
        training, held_out = (evaluation.dataset, None) if can_wait else (None, evaluation.dataset)
        verifier = start_verifiers(
            config.reward, training, held_out, tp_size,
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
        bar = stack.enter_context(ProgressBar("responses", after_seconds=0.0))
        part = stack.enter_context(part_of(out, engine.replica).open("ab"))
        for judged in judge_problems(
            engine, verifier, problems, config.evaluation, config.rollout,
            decode=partial(decode_responses, evaluation.inputs.tokenizer), policy_version=VERSION,
            on_progress=bar.show, keep_text=True, problems_per_batch=problems_per_batch,
            episodes=episodes,
        ):  # fmt: skip
            if judged:
                statuses = Counter(r["status"] for _, responses in judged for r in responses)
                failed = (
                    failure(prompt, r["status"], r["note"], config.reward, evaluation.dataset)
                    for prompt, responses in judged for r in responses if r["status"] in FAILED
                )  # fmt: skip
                check_failures(statuses, config.reward, next(failed, ""))
                lines = [
                    {"prompt_index": prompt.index, "prompt": prompt.text, "answer": prompt.answer,
                     "verifier": prompt.problem.verifier or config.reward.verifier,
                     "responses": responses}
                    for prompt, responses in judged
                ]  # fmt: skip
                append(part, lines)
            written += len(judged)
    # A replica that lost problems must not go unnoticed: parts are merged afterwards.
    total = int(sum_over_world(torch.tensor(float(written), dtype=torch.float64)))
    assert total == len(problems), f"{total} of {len(problems)} problems were written"


def build_engine(evaluation: Evaluation, config: VapoConfig) -> Any:
    """Build vLLM with the directory's weights; each rank reads all and keeps its shard."""
    # Imported late, so that mistakes are reported before megatron-core and vLLM load.
    from vapo_megatron.parallel.offload import is_on
    from vapo_megatron.rollout.vllm.engine import RolloutEngine

    hf_path = evaluation.hf_path
    reader = HfReader(hf_path)
    engine = RolloutEngine(
        str(hf_path), evaluation.inputs, config.rollout,
        dtype=config.rollout.dtype or config.model.dtype, seed=config.seed,
        offload=is_on(config.parallel),
    )  # fmt: skip
    engine.load_weights(((name, reader.read(name)) for name in reader.names()), VERSION)
    return engine
