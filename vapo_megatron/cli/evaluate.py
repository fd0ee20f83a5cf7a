"""An evaluation of a checkpoint on its own, in one process or in those that torchrun started.

Before: nothing. After: `out` holds every sample, and beside it stands a summary. Every rank holds a
part of a vLLM replica; the first rank of each writes what its replica sampled, and the world's
first one puts that together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from vapo_megatron.cli.command import ProgressBar, check_processes
from vapo_megatron.config import VapoConfig, check_together, read_config
from vapo_megatron.data.batch import Prompt
from vapo_megatron.data.prompts import read_prompts
from vapo_megatron.data.storage import append, replace_file
from vapo_megatron.errors import CheckpointError, ConfigError, DataError, UserError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.offload import is_on
from vapo_megatron.parallel.reduce import any_rank, sum_over_world
from vapo_megatron.reward.math_verifier import MathVerifier
from vapo_megatron.reward.scoring import check_answers
from vapo_megatron.rollout.evaluation.judging import judge_problems, sampling_settings
from vapo_megatron.rollout.evaluation.samples_file import (
    begin_parts,
    collect,
    lock_file,
    part_of,
    weights_digest,
)
from vapo_megatron.rollout.evaluation.statistics import Estimate, estimates
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.requests import max_model_len
from vapo_megatron.rollout.tokenizer import check_tokenizer, load_tokenizer
from vapo_megatron.run.directory import read_run
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

    Nothing is trained: the processes that there are hold vLLM replicas, whatever trained.

    Raises:
        ConfigError: see load_config; or vLLM's replicas do not divide the processes.
    """
    files = [checkpoint / "config.yaml"] if is_run_directory(checkpoint) else []
    config = read_config(files, overrides)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    tp_size = config.rollout.tensor_model_parallel_size
    if world_size % tp_size:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={tp_size} must divide the number of processes, "
            f"{world_size}; set it, or torchrun's --nproc-per-node"
        )
    layout = {
        "world_size": world_size,
        # As if all trained one copy of a model: no mini-batch has too few responses for that.
        "tensor_model_parallel_size": world_size,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "sequence_parallel": False,
    }
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=layout)})
    check_together(config)
    return config


def default_out(checkpoint: Path, data: Path) -> Path:
    """Return runs/evaluation/PATH/DATA.jsonl, PATH the checkpoint's from here or the root."""
    path = checkpoint.resolve()
    start = Path.cwd() if path.is_relative_to(Path.cwd()) else path.anchor
    return Path("runs/evaluation") / path.relative_to(start) / f"{data.stem}.jsonl"


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
        out: see samples_file; the summary stands beside it, ending in .json.
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
    dataset = read_prompts(
        str(data), config.data, tokenizer.encode, seed=config.seed, shuffle=False,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
    )  # fmt: skip
    shape = read_model_shape(hf_path)
    stop_token_ids = check_tokenizer(
        hf_path, tokenizer, config.rollout.stop_token_ids, shape.vocab_size
    )
    header = {
        "checkpoint": str(checkpoint), "weights": weights_digest(hf_path), "data": str(data),
        "problems": dataset.state_dict()["fingerprint"][:16], "num_problems": len(dataset),
        **config.evaluation.model_dump(include={"samples", "temperature", "top_p", "top_k"}),
        "max_response_tokens": config.rollout.max_response_tokens,
        "stop_token_ids": list(stop_token_ids), "seed": config.seed,
        "dtype": config.rollout.dtype or config.model.dtype,
    }  # fmt: skip
    # The sampler would refuse these, too, but late.
    sampling_settings(config.evaluation, config.rollout.max_response_tokens)
    max_model_len(shape, config.rollout)
    check_processes(config)
    backend.initialize_distributed(config.parallel.timeout_seconds)
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        done = _begin(out, header, config.rollout.tensor_model_parallel_size, stack)
        if len(done) < len(dataset):
            inputs = Inputs(shape, tokenizer, stop_token_ids, held_out=dataset)
            missing = [p for p in dataset.problems if p.index not in done]
            _sample(hf_path, config, inputs, missing, problems_per_batch, out)
        return _sum_up(out, header, config.seed) if dist.get_rank() == 0 else None


def _begin(
    out: Path, header: dict[str, Any], tp_size: int, stack: contextlib.ExitStack
) -> set[int]:
    """Begin the file, or go on with it: the first rank locks it, and begins every replica's part.

    Returns:
        The problems that it holds.

    Raises:
        DataError: on every rank.
    """
    told: list[tuple[set[int], str | None]] = [(set(), None)]
    if dist.get_rank() == 0:
        try:
            stack.enter_context(lock_file(out))
            done = set(collect(out, header))
            if len(done) < header["num_problems"]:
                begin_parts(out, header, dist.get_world_size() // tp_size)
            told = [(done, None)]
        except (UserError, OSError) as error:
            told = [(set(), str(error))]
    dist.broadcast_object_list(told, src=0)
    done, problem = told[0]
    unseen = problem is None and not out.is_file()
    if any_rank(unseen):
        problem = (
            f"--out={out} is not there on every node; give a file on a file system that all nodes "
            "share"
        )
    if problem is not None:
        raise DataError(problem)
    return done


def _sample(
    hf_path: Path,
    config: VapoConfig,
    inputs: Inputs,
    problems: Sequence[Prompt],
    problems_per_batch: int | None,
    out: Path,
) -> None:
    """Sample the problems batch by batch; each replica writes its own. All have when this returns.

    `inputs` has all problems, whose answers are checked before.
    """
    dataset = inputs.held_out
    assert dataset is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tp_size = config.rollout.tensor_model_parallel_size
    written = 0
    with contextlib.ExitStack() as stack:
        verifier = None
        if rank % tp_size == 0:
            verifier = MathVerifier(config.reward.num_workers, config.reward.timeout_seconds)
            stack.enter_context(verifier).start()
        replica, num_replicas = rank // tp_size, world_size // tp_size
        check_answers(verifier, dataset.path, dataset.answers, replica, num_replicas)
        engine = _engine(hf_path, config, inputs)
        stack.callback(engine.shutdown)
        bar = stack.enter_context(ProgressBar("responses", after_seconds=0.0))
        part = stack.enter_context(part_of(out, engine.replica).open("ab"))
        for judged in judge_problems(
            engine, verifier, problems, config.evaluation, config.rollout,
            policy_version=VERSION, on_progress=bar.show, keep_text=True,
            problems_per_batch=problems_per_batch,
        ):  # fmt: skip
            if judged:
                append(part, [_line(prompt, responses) for prompt, responses in judged])
            written += len(judged)
    total = int(sum_over_world(torch.tensor(float(written), dtype=torch.float64)))
    assert total == len(problems), f"{total} of {len(problems)} problems were written"


def _engine(hf_path: Path, config: VapoConfig, inputs: Inputs) -> Any:
    """Build the sampler with the directory's weights; each rank reads all and keeps its shard."""
    # Here, because mistakes are told before vLLM is loaded.
    from vapo_megatron.rollout.vllm.engine import RolloutEngine

    rank, world_size = dist.get_rank(), dist.get_world_size()
    reader = HfReader(hf_path)
    engine = RolloutEngine(
        str(hf_path), inputs, config.rollout,
        dtype=config.rollout.dtype or config.model.dtype, seed=config.seed,
        offload=is_on(config.parallel), rank=rank, world_size=world_size,
    )  # fmt: skip
    engine.load_weights(((name, reader.read(name)) for name in reader.names()), VERSION)
    return engine


def _line(prompt: Prompt, responses: Any) -> dict[str, Any]:
    return {
        "prompt_index": prompt.index,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "responses": responses,
    }


def _sum_up(out: Path, header: dict[str, Any], seed: int) -> dict[str, Estimate]:
    """Return the statistics of all problems of the file, and write them beside it."""
    values = collect(out, header)
    assert len(values) == header["num_problems"], f"{out} holds {len(values)} problems"
    found = estimates(list(values.values()), seed)
    summary = {**header, "statistics": {n: dataclasses.asdict(e) for n, e in found.items()}}
    replace_file(out.with_suffix(".json"), json.dumps(summary, indent=1) + "\n")
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
