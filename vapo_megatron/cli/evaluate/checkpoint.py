"""Evaluates a checkpoint outside of training, in one process or on all ranks of torchrun.

Before: nothing. After: `out` holds every sample, next to a summary. Every rank holds a shard of a
vLLM replica. The first rank of each replica writes its samples, and rank 0 merges them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.cli.evaluate.directory import date_of_run, find_hf_directory, is_run_directory
from vapo_megatron.config import RolloutConfig, VapoConfig, check_together, read_config
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.data.rollout import Prompt
from vapo_megatron.data.storage import append, replace_file
from vapo_megatron.errors import ConfigError, DataError, UserError, tell
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.models.sampled import check_sampled
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.environment import check_processes
from vapo_megatron.parallel.reduce import any_rank, gather_objects, sum_over_world
from vapo_megatron.reward.checks import FAILED, check_failures, failure, start_verifiers
from vapo_megatron.rollout.evaluation.judging import (
    judge_problems,
    reward_mean,
    sampling_settings,
)
from vapo_megatron.rollout.evaluation.samples_file import (
    begin_parts,
    collect,
    line_values,
    lock_file,
    noted_date,
    part_of,
    verdict_settings,
    weights_digest,
)
from vapo_megatron.rollout.evaluation.statistics import Estimate, as_json, estimates
from vapo_megatron.rollout.inputs import Inputs, read_prompts
from vapo_megatron.rollout.requests import max_model_len, with_own_limits
from vapo_megatron.rollout.tokenizer import (
    ChatTemplate,
    check_tokenizer,
    decode_responses,
    load_tokenizer,
)
from vapo_megatron.weights.hf_directory import exported_step
from vapo_megatron.weights.hf_reader import HfReader

T = TypeVar("T")

VERSION = 0
"""Of vLLM's weights, which never change here."""


def evaluation_config(
    checkpoint: Path, overrides: Sequence[str], num_processes: int | None
) -> VapoConfig:
    """Return a run directory's own configuration, or the defaults, with the overrides.

    The training layout is replaced: all processes hold vLLM replicas.

    Args:
        checkpoint: HF or run directory.
        overrides: section.field=value.
        num_processes: on all nodes; None: those of one replica.

    Raises:
        ConfigError: see load_config; or the replicas do not divide the processes.
    """
    files = [checkpoint / "config.yaml"] if is_run_directory(checkpoint) else []
    config = read_config(files, overrides).colocated()
    given = [text.partition("=")[0].strip() for text in overrides]
    if "rollout.max_prompt_tokens" not in given:
        # The run's limit is of its training data; see with_own_limits.
        config.rollout.model_fields_set.discard("max_prompt_tokens")
    tp_size = config.rollout.tensor_model_parallel_size
    world_size = tp_size if num_processes is None else num_processes
    if world_size < 1 or world_size % tp_size:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={tp_size} must divide the number of processes, "
            f"{world_size}; set it, or --nproc (torchrun's --nproc-per-node)"
        )
    # Tensor-parallel over all: with a data-parallel size of 1, no mini-batch has too few responses.
    layout = {
        "world_size": world_size, "tensor_model_parallel_size": world_size,
        "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1, "sequence_parallel": False,
    }  # fmt: skip
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=layout)})
    check_together(config)
    return config


class Evaluation(NamedTuple):
    """What is evaluated, known to fit together."""

    hf_path: Path
    inputs: Inputs
    dataset: PromptDataset
    """inputs.held_out."""
    header: dict[str, Any]
    """First line of the samples file, which identifies the evaluation."""
    rollout: RolloutConfig
    """The configuration's, with_own_limits of the data and the model."""


def check(checkpoint: Path, data: Path, config: VapoConfig, out: Path | None = None) -> Evaluation:
    """Check the files in one process; neither vLLM nor a process group is needed.

    Args:
        checkpoint: HF or run directory.
        data: problems, in the columns that config.data names.
        config: from evaluation_config.
        out: the samples file, whose prompts keep their date; None: there is none.

    Raises:
        UserError: the first thing that is wrong: what, where, and the remedy.
    """
    hf_path = find_hf_directory(checkpoint)
    tokenizer = load_tokenizer(hf_path)
    template = ChatTemplate(tokenizer, noted_date(out) or date_of_run(checkpoint))
    is_limited = "max_prompt_tokens" in config.rollout.model_fields_set
    with ProgressBar("prompts") as bar:
        dataset = read_prompts(
            str(data), config.data, tokenizer, seed=config.seed, shuffle=False,
            max_prompt_tokens=config.rollout.max_prompt_tokens if is_limited else sys.maxsize,
            on_progress=bar.show, skip_unusable=config.data.skip_unusable, template=template,
        )  # fmt: skip
    shape = read_model_shape(hf_path, "--checkpoint")
    check_sampled(hf_path, shape, "--checkpoint")
    stop_token_ids = check_tokenizer(
        hf_path, tokenizer, config.rollout.stop_token_ids, shape.vocab_size
    )
    longest = max(len(dataset.tokens(index)) for index in range(len(dataset)))
    rollout = with_own_limits(config.rollout, shape, longest)
    # vLLM would refuse these too, but late.
    sampling_settings(config.evaluation, rollout.max_response_tokens)
    max_model_len(shape, rollout)
    known = {"step": exported_step(hf_path), "date": template.date}
    header = {
        "checkpoint": str(checkpoint), **{k: v for k, v in known.items() if v is not None},
        "weights": weights_digest(hf_path), "data": str(data),
        "problems": dataset.state_dict()["fingerprint"][:16], "num_problems": len(dataset),
        **config.evaluation.model_dump(include={"samples", "temperature", "top_p", "top_k"}),
        "max_response_tokens": rollout.max_response_tokens,
        "stop_token_ids": list(stop_token_ids), "seed": config.seed,
        "dtype": config.rollout.dtype or config.model.dtype,
        **verdict_settings(config.reward, dataset.rows),
    }  # fmt: skip
    inputs = Inputs(shape, tokenizer, stop_token_ids, held_out=dataset, date=template.date)
    return Evaluation(hf_path, inputs, dataset, header, rollout)


class Summary(NamedTuple):
    """The statistics of an evaluation, by name."""

    whole: dict[str, Estimate]
    by_verifier: dict[str, tuple[int, dict[str, Estimate]]]
    """Each verifier's number of problems, and their statistics; empty where there is only one."""


def check_out(out: Path, evaluation: Evaluation) -> None:
    """Refuse the samples of another evaluation; begin those of dated prompts, for all processes.

    Raises:
        DataError: names the file and what differs, or says that it is being written.
    """
    if out.exists() or evaluation.inputs.date is not None:
        with lock_file(out):
            collect(out, evaluation.header)


def evaluate_checkpoint(
    evaluation: Evaluation, config: VapoConfig, out: Path, problems_per_batch: int | None = None
) -> Summary | None:
    """Sample and judge every problem that is missing in `out`, then summarize. Collective.

    Args:
        evaluation, config, out, problems_per_batch: see sample_missing; the summary has the same
            name as out, ending in .json.

    Returns:
        The statistics on rank 0, None elsewhere.

    Raises:
        UserError: see sample_missing.
    """
    return sample_missing(
        evaluation, config, out, evaluation.dataset.problems, problems_per_batch,
        lambda: _sum_up(out, evaluation, config),
    )  # fmt: skip


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
    check_processes(config.parallel.world_size, config.rollout.num_processes)
    backend.initialize_distributed(config.parallel.timeout_seconds)
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
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
        engine = build_engine(evaluation, config)
        stack.callback(engine.shutdown)
        bar = stack.enter_context(ProgressBar("responses", after_seconds=0.0))
        part = stack.enter_context(part_of(out, engine.replica).open("ab"))
        for judged in judge_problems(
            engine, verifier, problems, config.evaluation, config.rollout,
            decode=partial(decode_responses, evaluation.inputs.tokenizer), policy_version=VERSION,
            on_progress=bar.show, keep_text=True, problems_per_batch=problems_per_batch,
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


def _sum_up(out: Path, evaluation: Evaluation, config: VapoConfig) -> Summary:
    """Return the statistics of all problems, and write them next to the file."""
    header, reward, seed = evaluation.header, config.reward, config.seed

    def measured(line: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
        verifier, values = line["verifier"], line_values(line)
        if reward.from_score is not None:
            values["reward_mean"] = reward_mean(line["responses"], reward, verifier)
        return verifier, values

    found = collect(out, header, measured)
    assert len(found) == len(evaluation.dataset.problems), f"{out} holds {len(found)} problems"
    groups: dict[str, list[dict[str, float]]] = {}
    for verifier, values in found.values():
        groups.setdefault(verifier, []).append(values)
    whole = estimates([values for _, values in found.values()], seed)
    by_verifier = {}
    if len(groups) > 1:
        by_verifier = {
            name: (len(values), estimates(values, seed)) for name, values in sorted(groups.items())
        }
    left_out = len(evaluation.dataset.left_out)
    written = {**header, "left_out": left_out, "statistics": as_json(whole)}
    if by_verifier:
        written["by_verifier"] = {
            name: {"num_problems": count, "statistics": as_json(statistics)}
            for name, (count, statistics) in by_verifier.items()
        }
    replace_file(out.with_suffix(".json"), json.dumps(written, indent=1) + "\n")
    return Summary(whole, by_verifier)
