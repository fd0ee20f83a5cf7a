"""Checks a run's files before it starts: for --dry-run, before torchrun, and on every rank.

Loads torch if the model's files exist, but never megatron-core or vLLM.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.cli.resumed import check_checkpoint, own_checkpoints, own_state
from vapo_megatron.config.missing import hub_id, missing_data, missing_model
from vapo_megatron.data.lock import check_not_in_use
from vapo_megatron.errors import CheckpointError, ConfigError
from vapo_megatron.models.hf_config import check_layout, read_model_shape, read_reward_shape
from vapo_megatron.models.known import KNOWN_MODELS, known_shape
from vapo_megatron.models.sampled import check_sampled
from vapo_megatron.parallel import libraries
from vapo_megatron.rollout.requests import max_model_len
from vapo_megatron.rollout.vllm.extra_arguments import check_extra_arguments
from vapo_megatron.run.wandb_run import check_wandb

if TYPE_CHECKING:
    from vapo_megatron.config import VapoConfig
    from vapo_megatron.models.hf_config import ModelShape
    from vapo_megatron.reward.verifiers import Verifiers
    from vapo_megatron.rollout.inputs import Inputs

_FIRST_ANSWERS = 200
"""Ground truths of each file that a launch reads: enough to find that none can be judged."""


def check_run(config: VapoConfig, replay: Path | None, *, all_answers: bool = False) -> list[str]:
    """Check all that one process can: what a launch and a dry run have in common.

    Args:
        config: valid by itself.
        replay: run directory to replay; None: sample.
        all_answers: see check_answers; a dry run looks at all, a launch leaves that to its ranks.

    Returns:
        What to tell: a warning if the disk will be full, and unless it is a replay or not
        all_answers, how many rows of each file each verifier judges.

    Raises:
        UserError: the first thing that is wrong: what, where, and the remedy.
    """
    from vapo_megatron.planning.disk import check_disk
    from vapo_megatron.rollout.input_warnings import tell_warnings

    inputs = check_rank(config, replay)
    if all_answers:  # A run's first rank says it once the processes have started.
        tell_warnings(inputs)
    room = check_disk(config, inputs.shape)
    if replay is not None:
        return room
    return room + check_answers(config, inputs, all_answers=all_answers)


def check_rank(config: VapoConfig, replay: Path | None) -> Inputs:
    """Check what every rank of a run checks again, and return what was read. Raises UserError."""
    if replay is not None and config.rollout.is_disaggregated:
        raise ConfigError(
            f"--replay {replay} samples nothing and needs rollout.placement=colocated, found "
            "disaggregated; set rollout.placement=colocated rollout.num_processes=0 rollout.lag=0"
        )
    libraries.check_driver()
    inputs = check_inputs(config, replay)
    if replay is None:
        _check_memory(config, inputs.shape)
    return inputs


def _check_memory(config: VapoConfig, shape: ModelShape) -> None:
    """Refuse what cannot fit into this process's GPU; without a GPU nothing is checked."""
    import torch

    from vapo_megatron.planning.misfits import check_fits

    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
        check_fits(config, shape, gpu.total_memory)


def check_inputs(config: VapoConfig, replay: Path | None) -> Inputs:
    """Refuse files that are missing or damaged, or do not fit each other or the configuration.

    Args:
        config: valid by itself.
        replay: run directory to replay, which needs neither data nor tokenizer; None: sample.

    Returns:
        What was read, so that a run does not read it again.

    Raises:
        UserError: the first thing that is wrong: what, where, and the remedy.
    """
    from vapo_megatron.planning.disk import check_disk

    # Cheapest first, so that most mistakes are reported within a second.
    check_wandb(config.logging)
    require_paths(config, replay)
    check_not_in_use(Path(config.logging.run_dir))
    shape = read_model_shape(str(config.model.hf_path))
    check_sizes(config, shape)
    if replay is None:
        check_sampled(str(config.model.hf_path), shape)
        check_extra_arguments(config.rollout.vllm_args)
    # All paths are local, so do not ask the hub; read when transformers is loaded.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vapo_megatron.rollout.inputs import Inputs, read_inputs

    inputs = Inputs(shape)
    if replay is None:
        hf_path = str(config.model.hf_path)
        state = own_state(config)
        date = None if state is None else state["run"].get("date")
        with ProgressBar("prompts") as bar:
            inputs = read_inputs(
                shape, hf_path, config.data, config.rollout, config.evaluation,
                seed=config.seed, on_progress=bar.show, date=date,
            )  # fmt: skip
        if inputs.dataset is not None and state is not None:
            inputs.dataset.check_state(state["run"]["data"])
        check_reward_model(config, inputs)
    else:
        from vapo_megatron.rollout.replay import check_dump

        # Of the checkpoint to resume from, damaged or not.
        found = own_checkpoints(config)
        steps_done = int(found[0].name.split("_")[1]) if found else 0
        steps = range(steps_done, config.algorithm.num_steps)
        check_dump(replay, config.algorithm, config.rollout, shape, steps)
    _check_weights(config, shape)
    check_checkpoint(config, shape)
    check_disk(config, shape)
    return inputs


def _try_out(verifiers: Verifiers, config: VapoConfig, inputs: Inputs) -> None:
    from vapo_megatron.reward.checks import check_whole_groups

    verifiers.load()
    datasets = (d for d in (inputs.dataset, inputs.held_out) if d is not None)
    verifiers.try_out(row for dataset in datasets for row in dataset.rows)
    check_whole_groups(config.rollout, sees_groups=verifiers.sees_groups())


def check_answers(config: VapoConfig, inputs: Inputs, *, all_answers: bool = True) -> list[str]:
    """Refuse problems that their verifier cannot judge; a run's ranks share this work.

    Args:
        config: valid by itself.
        inputs: their rows get the verifier that hybrid chose, if all are looked at.
        all_answers: integers take no time, other ground truths some milliseconds each; False: only
            a file's first rows.

    Returns:
        How many rows of each file each verifier judges, and usable.py's warnings; empty unless
        all_answers.

    Raises:
        ConfigError: a verifier does not load or judge, or the reward model would judge nothing.
        DataError: names the last such row of a file.
    """
    from vapo_megatron.data.labels import count_rows, labels_of
    from vapo_megatron.reward.checks import examine
    from vapo_megatron.reward.usable import settle
    from vapo_megatron.reward.verifiers import (
        Verifiers,
        check_reward_model_judges,
        default_name,
        reward_model_refusals,
    )

    counts: list[str] = []
    refusals = reward_model_refusals(has_reward_model=config.model.reward_hf_path is not None)
    with Verifiers(config.reward) as verifiers:
        _try_out(verifiers, config, inputs)
        given = {"data": inputs.dataset, "evaluation": inputs.held_out}
        for (section, dataset), refusal in zip(given.items(), refusals, strict=True):
            if dataset is None:
                continue
            rows = range(len(dataset.rows))
            with ProgressBar("ground truths") as bar:
                # The ranks check all rows later, in shares; a few rows catch a wrong column now.
                looked_at = rows if all_answers else rows[:_FIRST_ANSWERS]
                chosen, bad = examine(verifiers, dataset, looked_at, refusal, bar.show)
            if all_answers:
                dataset.assign(chosen)
            lines: list[str] = []
            if all_answers or not config.data.skip_unusable:
                lines = settle(dataset, bad, config.reward, skip=config.data.skip_unusable)
            if all_answers:
                labels = labels_of(dataset.kept, default_name(config.reward))
                counts += count_rows(labels, dataset.path, section)
                counts += [f"warning: {line}" for line in lines]
    if all_answers and (dataset := inputs.dataset) is not None:
        path, kept = config.model.reward_hf_path, [row for _, row in dataset.kept]
        check_reward_model_judges(config.reward, kept, dataset.path, path)
    return counts


def require_paths(config: VapoConfig, replay: Path | None, *, writes: bool = True) -> None:
    """Check that a run's inputs exist, and that its directory can be written to.

    Args:
        config: valid by itself.
        replay: run directory to replay; None: sample.
        writes: the run directory will be written to.

    Raises:
        ConfigError: a path is not set or does not exist, or a replay would overwrite its dump.
    """
    run_dir = config.logging.run_dir
    required: dict[str, str | Path | None] = {"model.hf_path": config.model.hf_path}
    optional = {"model.critic_hf_path": config.model.critic_hf_path}
    if replay is None:
        optional["model.reward_hf_path"] = config.model.reward_hf_path
        if not config.data.sources:
            required["data.train_path"] = config.data.train_path
        for name, source in config.data.sources.items():
            required[f"data.sources.{name}.path"] = source.path
        for name, file in config.evaluation.sources.items():
            required[f"evaluation.sources.{name}.path"] = file.path
        optional["evaluation.path"] = config.evaluation.path
    else:
        required["--replay"] = replay
        # --replay names a run directory or one of its dumps.
        dumps = [(replay / "replay").resolve(), replay.resolve()]
        written = [Path(run_dir, name).resolve() for name in ("replay", "skipped")]
        if writes and any(path in dumps for path in written):
            raise ConfigError(
                f"logging.run_dir={run_dir} is the run that is replayed, which would be written "
                "over; set logging.run_dir to another directory"
            )

    for name, path in required.items():
        if path is None:
            raise ConfigError(f"{name} is required; set {name}=PATH")
    for name, path in {**required, **optional}.items():
        if path is not None and not os.path.exists(path):
            told = missing_model if name.startswith("model.") else missing_data
            raise ConfigError(told(name, path))
    if writes:
        _require_directory(run_dir)


def _require_directory(run_dir: str) -> None:
    """Refuse a run directory that cannot be made or written to."""
    path = Path(run_dir).absolute()
    first = next(p for p in (path, *path.parents) if p.exists())
    if not first.is_dir() or not os.access(first, os.W_OK | os.X_OK):
        wrong = "cannot be written to" if first.is_dir() else "is no directory"
        raise ConfigError(f"logging.run_dir={run_dir}: {first} {wrong}; set another directory")


def check_sizes(config: VapoConfig, shape: ModelShape) -> None:
    """Refuse a layout or lengths that the model does not have; ConfigError names the fields."""
    check_layout(shape, config.parallel)
    max_model_len(shape, config.rollout)


def check_reward_model(config: VapoConfig, inputs: Inputs) -> None:
    """Refuse a reward model that cannot score the actor's responses, or that judges no row.

    Raises:
        UserError: names model.reward_hf_path.
    """
    from vapo_megatron.reward.verifiers import check_reward_model_judges
    from vapo_megatron.rollout.tokenizer import check_same_tokenizer

    path = config.model.reward_hf_path
    if path is None:
        return
    shape = read_reward_shape(config.model, inputs.shape)
    try:
        check_sizes(config, shape)
    except ConfigError as error:
        raise ConfigError(f"model.reward_hf_path={path}: {error}") from None
    check_same_tokenizer(inputs.tokenizer, path)
    _check_files("reward_model", "model.reward_hf_path", path, shape)
    assert inputs.dataset is not None, "a replay needs no reward model"
    check_reward_model_judges(config.reward, inputs.dataset.rows, inputs.dataset.path, path)


def is_published(config: VapoConfig) -> bool:
    """Is the model a published one that is not on this machine? It is planned without files."""
    path = config.model.hf_path
    if path is None or os.path.exists(path) or hub_id(path) is not None:
        return False
    return Path(path).name in KNOWN_MODELS


def check_published(config: VapoConfig) -> None:
    """Check what a published model's sizes decide, without its files. Raises ConfigError."""
    check_sizes(config, known_shape(Path(str(config.model.hf_path)).name))


def _check_weights(config: VapoConfig, shape: ModelShape) -> None:
    """Compare the headers of the initial weights with the model's sizes."""
    starts = [("actor", "model.hf_path", config.model.hf_path)]
    if "critic" in config.algorithm.trained_roles:
        starts.append(("critic", "model.critic_hf_path", config.model.critic_hf_path))
    for role, field, path in starts:
        if path is not None:
            _check_files(role, field, path, shape)


def _check_files(role: str, field: str, path: str, shape: ModelShape) -> None:
    """Compare the headers of a directory's weights with the sizes of a role's model."""
    from vapo_megatron.weights.load_hf import check_weights

    try:
        check_weights(Path(path), shape, role)
    except CheckpointError as error:
        raise CheckpointError(f"{field}={path}: {error}") from None
