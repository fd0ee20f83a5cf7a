"""An evaluation of a checkpoint on its own, in one process or in those that torchrun started.

Before: nothing. After: `out` holds every sample, and beside it stands a summary. Every rank holds a
part of a vLLM replica; the first one writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from vapo_megatron.batch import Prompt
from vapo_megatron.config import ParallelConfig, VapoConfig, load_config
from vapo_megatron.data.prompts import PromptDataset, load_problems
from vapo_megatron.errors import CheckpointError, ConfigError, DataError, UserError
from vapo_megatron.evaluation import judge_problems
from vapo_megatron.evaluation_file import EvaluationFile, weights_digest
from vapo_megatron.evaluation_statistics import Estimate, estimates
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel import backend
from vapo_megatron.progress_bar import ProgressBar
from vapo_megatron.reward.math_verifier import MathVerifier
from vapo_megatron.reward.scoring import check_answers
from vapo_megatron.rollout.tokenizer import find_stop_token_ids, load_tokenizer
from vapo_megatron.run_directory import read_run, replace_file
from vapo_megatron.train import check_processes
from vapo_megatron.weights.hf_reader import HfReader

VERSION = 0
"""Of the sampler's weights, which never change here."""


def find_hf_directory(checkpoint: Path) -> Path:
    """Return the HF directory of a checkpoint: itself, or a run directory's hf_export.

    Raises:
        CheckpointError: neither; says how a run is exported.
    """
    if not is_run_directory(checkpoint):
        if (checkpoint / "config.json").is_file():
            return checkpoint
        raise CheckpointError(
            f"--checkpoint={checkpoint} is neither an HF directory (config.json) nor a run "
            "directory (config.yaml); give one of them"
        )
    export = checkpoint / "hf_export"
    if (export / "config.json").is_file():
        return export
    base = (read_run(checkpoint).config.get("model") or {}).get("hf_path", "BASE")
    latest = checkpoint / "checkpoints/latest"
    if not latest.is_file():
        raise CheckpointError(
            f"--checkpoint={checkpoint}: the run has neither hf_export nor a checkpoint yet; let "
            "it go on"
        )
    actor = checkpoint / "checkpoints" / latest.read_text().strip() / "actor"
    raise CheckpointError(
        f"--checkpoint={checkpoint}: the run has no hf_export; make it with python "
        f"tools/convert_megatron_to_hf.py --megatron {actor} --hf {base} --out {export}"
    )


def is_run_directory(checkpoint: Path) -> bool:
    """Is it a directory that logging.run_dir named?"""
    return (checkpoint / "config.yaml").is_file()


def evaluation_config(checkpoint: Path, overrides: Sequence[str]) -> VapoConfig:
    """Return the configuration: of a run directory its own, else the defaults, then the overrides.

    Nothing is trained: the layout is one of vLLM replicas on all processes.

    Raises:
        ConfigError: see load_config; or vLLM's replicas do not divide the processes.
    """
    files = [checkpoint / "config.yaml"] if is_run_directory(checkpoint) else []
    config = load_config(files, overrides)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    tp_size = config.rollout.tensor_model_parallel_size
    if world_size % tp_size:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={tp_size} must divide the number of processes, "
            f"{world_size}; set it, or torchrun's --nproc-per-node"
        )
    return config.model_copy(update={"parallel": ParallelConfig(world_size=world_size)})


def default_out(checkpoint: Path, data: Path) -> Path:
    """Return runs/evaluation/CHECKPOINT/DATA.jsonl."""
    return Path("runs/evaluation") / checkpoint.resolve().name / f"{data.stem}.jsonl"


def evaluate_checkpoint(
    checkpoint: Path,
    data: Path,
    config: VapoConfig,
    out: Path,
    problems_per_batch: int | None = None,
) -> dict[str, Estimate] | None:
    """Sample and judge every problem that `out` does not hold yet, and sum up. Collective.

    Args:
        checkpoint: HF or run directory.
        data: problems, in the columns that config.data names.
        config: from evaluation_config.
        out: see evaluation_file; the summary stands beside it, ending in .json.
        problems_per_batch: problems that are sampled together and then written; None: enough for
            two responses for each that the replicas sample at once.

    Returns:
        The statistics on the first rank, None elsewhere.

    Raises:
        UserError: on every rank.
    """
    if problems_per_batch is not None and problems_per_batch < 1:
        raise ConfigError(f"--batch={problems_per_batch} must be at least 1")
    hf_path = find_hf_directory(checkpoint)
    tokenizer = load_tokenizer(hf_path)
    dataset = PromptDataset(
        load_problems(data, config.data.prompt_column, config.data.answer_column),
        tokenizer.encode,
        seed=config.seed,
        shuffle=False,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
    )
    stop_token_ids = find_stop_token_ids(
        hf_path, tokenizer, config.rollout.stop_token_ids, read_model_shape(hf_path).vocab_size
    )
    header = {
        "checkpoint": str(checkpoint), "weights": weights_digest(hf_path), "data": str(data),
        "problems": dataset.state_dict()["fingerprint"][:16], "num_problems": len(dataset),
        **config.evaluation.model_dump(include={"samples", "temperature", "top_p", "top_k"}),
        "max_response_tokens": config.rollout.max_response_tokens,
        "stop_token_ids": list(stop_token_ids), "seed": config.seed,
        "dtype": config.rollout.dtype or config.model.dtype,
    }  # fmt: skip
    check_processes(config)
    backend.initialize_distributed(config.parallel.timeout_seconds)
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        file, done = _open(out, header, stack)
        if len(done) < len(dataset):
            answers = str(data), [p.answer for p in dataset.problems]
            missing = [p for p in dataset.problems if p.index not in done]
            _sample(hf_path, config, missing, answers, problems_per_batch, file)
        return None if file is None else _sum_up(file, header, config.seed)


def _open(
    out: Path, header: dict[str, Any], stack: contextlib.ExitStack
) -> tuple[EvaluationFile | None, list[int]]:
    """Open the file on the first rank; return it there, and everywhere the problems it holds.

    Raises:
        DataError: on every rank.
    """
    file = None
    told: list[tuple[list[int], str | None]] = [([], None)]
    if dist.get_rank() == 0:
        try:
            file = stack.enter_context(EvaluationFile(out, header))
            told = [(list(file.values), None)]
        except (UserError, OSError) as error:
            told = [([], str(error))]
    dist.broadcast_object_list(told, src=0)
    done, problem = told[0]
    if problem is not None:
        raise DataError(problem)
    return file, done


def _sample(
    hf_path: Path,
    config: VapoConfig,
    problems: Sequence[Prompt],
    answers: tuple[str, Sequence[str]],
    problems_per_batch: int | None,
    file: EvaluationFile | None,
) -> None:
    """Sample the problems batch by batch; the first rank writes each one.

    `answers` are the data file and all its ground truths, which are checked before.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tp_size, samples = config.rollout.tensor_model_parallel_size, config.evaluation.samples
    with contextlib.ExitStack() as stack:
        verifier = None
        if rank % tp_size == 0:
            verifier = MathVerifier(config.reward.num_workers, config.reward.timeout_seconds)
            stack.enter_context(verifier).start()
        check_answers(verifier, *answers, rank // tp_size, world_size // tp_size)
        engine = _engine(hf_path, config)
        stack.callback(engine.shutdown)
        # Texts are gathered in host memory: on a GPU each rank would hold as much as the longest.
        group = dist.new_group(backend="gloo")
        at_once = 2 * engine.num_replicas * config.rollout.max_num_sequences
        batch = problems_per_batch or max(1, at_once // samples)
        bar = ProgressBar("responses", len(problems) * samples, shown=file is not None)
        stack.enter_context(bar)
        for start in range(0, len(problems), batch):
            part = problems[start : start + batch]

            def show(done: int, total: int, start: int = start, size: int = len(part)) -> None:
                bar.show(round((start + size * done / total) * samples))

            judged = judge_problems(
                engine, verifier, config, part,
                policy_version=VERSION, on_progress=show, keep_text=True, group=group,
            )  # fmt: skip
            if file is not None and judged is not None:
                file.append([_line(p, responses) for p, responses in zip(part, judged)])


def _engine(hf_path: Path, config: VapoConfig) -> Any:
    """Build the sampler with the directory's weights; each rank reads all and keeps its shard."""
    # Here, because mistakes are told before vLLM is loaded.
    from vapo_megatron.rollout.engine import RolloutEngine

    rank, world_size = dist.get_rank(), dist.get_world_size()
    engine = RolloutEngine(str(hf_path), config, rank=rank, world_size=world_size)
    reader = HfReader(hf_path)
    engine.load_weights(((name, reader.read(name)) for name in reader.names()), VERSION)
    return engine


def _line(prompt: Prompt, responses: Any) -> dict[str, Any]:
    return {
        "prompt_index": prompt.index,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "responses": responses,
    }


def _sum_up(file: EvaluationFile, header: dict[str, Any], seed: int) -> dict[str, Estimate]:
    """Return the statistics of all problems of the file, and write them beside it."""
    found = estimates([file.values[index] for index in sorted(file.values)], seed)
    summary = {**header, "statistics": {n: dataclasses.asdict(e) for n, e in found.items()}}
    replace_file(file.path.with_suffix(".json"), json.dumps(summary, indent=1) + "\n")
    return found


def print_table(found: dict[str, Estimate], title: str) -> None:
    """Print the statistics for people."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column("95% interval", justify="right")
    for name, estimate in found.items():
        form = ",.1f" if name == "response_length_mean" else ".4f"
        low, high = format(estimate.low, form), format(estimate.high, form)
        label = name.replace("_mean", " (tokens)").replace("_", " ")
        table.add_row(label, format(estimate.value, form), f"{low} .. {high}")
    Console().print(table)
