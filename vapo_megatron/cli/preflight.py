"""Checks a run's files before it starts: for --dry-run, before torchrun, and on every rank.

Loads torch once the model's sizes are known to fit, but never megatron-core or vLLM.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_megatron.cli.checks.paths import require_paths
from vapo_megatron.cli.checks.sizes import check_memory, check_sizes
from vapo_megatron.config import VapoConfig
from vapo_megatron.data.lock import check_not_in_use
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.models.sampled import check_sampled
from vapo_megatron.parallel import libraries
from vapo_megatron.rollout.vllm.extra_arguments import check_extra_arguments
from vapo_megatron.run.wandb_run import check_wandb

if TYPE_CHECKING:
    from vapo_megatron.rollout.inputs import Inputs


def check_run(config: VapoConfig, replay: Path | None, *, all_answers: bool = False) -> list[str]:
    """Check all that one process can: what a launch and a dry run have in common.

    Args:
        config: valid by itself.
        replay: run directory to replay; None: sample.
        all_answers: see check_answers; a dry run looks at all, a launch leaves that to its ranks.

    Returns:
        What to tell: a warning if the disk will be full, and unless it is a replay or not
        all_answers, how many rows of each file each verifier judges, and an episode; or how many
        responses the files give.

    Raises:
        UserError: the first thing that is wrong: what, where, and the remedy.
    """
    inputs = check_rank(config, replay)
    # These load torch, as check_rank has by now.
    from vapo_megatron.cli.checks.answers import check_answers
    from vapo_megatron.cli.checks.episode import try_episode
    from vapo_megatron.planning.disk import check_disk
    from vapo_megatron.rollout.given import count_responses
    from vapo_megatron.rollout.input_warnings import tell_warnings

    if all_answers:  # A run's first rank says it once the processes have started.
        tell_warnings(inputs)
    # check_rank has refused a full disk; this is for the warning.
    told = check_disk(config, inputs.shape)
    if not config.samples and all_answers:
        told += count_responses(inputs)
    if replay is None and config.samples:
        told += check_answers(config, inputs, all_answers=all_answers)
        episode = try_episode(config, inputs)
        told += episode if all_answers else []
    return told


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
        check_memory(config, inputs.shape)
    return inputs


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
    # Cheapest first, so that most mistakes are reported within a second.
    check_wandb(config.logging)
    require_paths(config, replay)
    check_not_in_use(Path(config.logging.run_dir))
    shape = read_model_shape(str(config.model.hf_path))
    check_sizes(config, shape)
    if replay is None and config.samples:
        check_sampled(str(config.model.hf_path), shape)
        check_extra_arguments(config.rollout.vllm_args)
    # All paths are local, so do not ask the hub; read when transformers is loaded.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Loads torch.
    from vapo_megatron.cli.checks.contents import read_checked

    return read_checked(config, shape, replay)
