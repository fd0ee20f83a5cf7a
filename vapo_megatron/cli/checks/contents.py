"""Checks before the start: what the run's files hold, read once for all that needs it."""

from __future__ import annotations

from pathlib import Path

from vapo_megatron.cli.checks.checkpoint import check_checkpoint, own_checkpoints, own_state
from vapo_megatron.cli.checks.weights import check_reward_model, check_weights
from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.config import VapoConfig
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning.disk import check_disk
from vapo_megatron.rollout.inputs import Inputs, read_inputs
from vapo_megatron.rollout.replay import check_dump


def read_checked(config: VapoConfig, shape: ModelShape, replay: Path | None) -> Inputs:
    """Read the prompts, or look at the dump to replay; check weights, checkpoint and disk.

    The paths exist. Raises UserError: see preflight.check_inputs.
    """
    if replay is None:
        inputs = _read_prompts(config, shape)
        check_reward_model(config, inputs)
    else:
        inputs = Inputs(shape)
        # Of the checkpoint to resume from, damaged or not.
        found = own_checkpoints(config)
        steps_done = int(found[0].name.split("_")[1]) if found else 0
        steps = range(steps_done, config.algorithm.num_steps)
        check_dump(replay, config.algorithm, config.rollout, shape, steps)
    check_weights(config, shape)
    check_checkpoint(config, shape)
    check_disk(config, shape)
    return inputs


def _read_prompts(config: VapoConfig, shape: ModelShape) -> Inputs:
    """Read the tokenizer and the prompts, which must be those of a checkpoint to resume from."""
    state = own_state(config)
    date = None if state is None else state["run"].get("date")
    with ProgressBar("prompts") as bar:
        inputs = read_inputs(
            shape, str(config.model.hf_path), config.data, config.rollout, config.evaluation,
            seed=config.seed, environment=config.environment, on_progress=bar.show, date=date,
        )  # fmt: skip
    if inputs.dataset is not None and state is not None:
        inputs.dataset.check_state(state["run"]["data"])
    return inputs
