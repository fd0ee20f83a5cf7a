"""What is sampled from, checked in one process: a checkpoint and the prompts of a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.cli.sampling.directory import date_of_run, find_hf_directory, is_run_directory
from vapo_megatron.cli.sampling.probes import Probe
from vapo_megatron.config import RolloutConfig, VapoConfig, check_together, read_config
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.models.sampled import check_sampled
from vapo_megatron.rollout.evaluation.judging import sampling_settings
from vapo_megatron.rollout.evaluation.samples_file import (
    noted_date,
    verdict_settings,
    weights_digest,
)
from vapo_megatron.rollout.inputs import Inputs, read_prompts, tools_of
from vapo_megatron.rollout.requests import max_model_len, with_own_limits
from vapo_megatron.rollout.tokenizer import ChatTemplate, check_tokenizer, load_tokenizer
from vapo_megatron.weights.hf_directory import exported_step


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
    # Responses are sampled, whatever the run was trained on.
    sampled = config.data.model_copy(update={"response_column": None})
    config = config.model_copy(update={"data": sampled})
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
    probe: Probe | None = None
    """How responses begin, and what says whether they reflect; None: nothing."""


def check(
    checkpoint: Path,
    data: Path,
    config: VapoConfig,
    out: Path | None = None,
    probe: Probe | None = None,
) -> Evaluation:
    """Check the files in one process; neither vLLM nor a process group is needed.

    Args:
        checkpoint: HF or run directory.
        data: problems, in the columns that config.data names.
        config: from evaluation_config.
        out: the samples file, whose prompts keep their date; None: there is none.
        probe: how responses begin; None: by nothing.

    Raises:
        UserError: the first thing that is wrong: what, where, and the remedy.
    """
    hf_path = find_hf_directory(checkpoint)
    tokenizer = load_tokenizer(hf_path)
    date = noted_date(out) or date_of_run(checkpoint)
    template = ChatTemplate(tokenizer, date, tools_of(config.environment, tokenizer))
    # The default limit is for training; an evaluation skips no problem unless asked to.
    is_limited = "max_prompt_tokens" in config.rollout.model_fields_set
    with ProgressBar("prompts") as bar:
        dataset = read_prompts(
            str(data), config.data, tokenizer, seed=config.seed, shuffle=False,
            max_prompt_tokens=config.rollout.max_prompt_tokens if is_limited else sys.maxsize,
            on_progress=bar.show, skip_unusable=config.data.skip_unusable, template=template,
            begun=None if probe is None else probe.begun(tokenizer, str(data)),
        )  # fmt: skip
    shape = read_model_shape(hf_path, "--checkpoint")
    check_sampled(hf_path, shape, "--checkpoint")
    stop_token_ids = check_tokenizer(
        hf_path, tokenizer, config.rollout.stop_token_ids, shape.vocab_size
    )
    longest = max(len(dataset.tokens(index)) for index in range(len(dataset)))
    if config.environment.is_on:
        longest = max(longest, config.rollout.max_prompt_tokens)  # It may say more than the data.
    rollout = with_own_limits(config.rollout, shape, longest)
    # vLLM would refuse these too, but late.
    sampling_settings(config.evaluation, rollout.max_response_tokens)
    max_model_len(shape, rollout)
    known = {"step": exported_step(hf_path), "date": template.date}
    # What must agree when an interrupted evaluation continues the samples file.
    header = {
        "checkpoint": str(checkpoint), **{k: v for k, v in known.items() if v is not None},
        "weights": weights_digest(hf_path), "data": str(data),
        "problems": dataset.state_dict()["fingerprint"][:16], "num_problems": len(dataset),
        **config.evaluation.model_dump(include={"samples", "temperature", "top_p", "top_k"}),
        "max_response_tokens": rollout.max_response_tokens,
        "stop_token_ids": list(stop_token_ids), "seed": config.seed,
        "dtype": config.rollout.dtype or config.model.dtype,
        **verdict_settings(config.reward, dataset.rows),
        **({"environment": config.environment.model_dump()} if config.environment.is_on else {}),
        **({} if probe is None else probe.header(dataset.rows)),
    }  # fmt: skip
    inputs = Inputs(shape, tokenizer, stop_token_ids, held_out=dataset, date=template.date)
    return Evaluation(hf_path, inputs, dataset, header, rollout, probe)
