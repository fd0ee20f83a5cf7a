"""Arms to compare, as data, and the jobs of a seed's arms.

OUT/seed_0/base, data, reward_model     shared by the arms of a seed
OUT/seed_0/value                        value pretraining run: the arms' initial critic
OUT/seed_0/ARM                          run directory of an arm
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.jobs import BASE_SOURCES, CONFIGS, Job, Seed, changed, read_state
from vapo_megatron.config import load_config
from vapo_megatron.errors import UserError
from vapo_megatron.run.report.comparison import flatten

HAS_ITS_OWN = "each seed has its own; remove it"
NOT_FOR_ALL = {
    "seed": f"{HAS_ITS_OWN}: --seeds chooses the seeds",
    "logging.run_dir": "each run has its own; remove it and use --out",
    "model.hf_path": HAS_ITS_OWN,
    "model.critic_hf_path": HAS_ITS_OWN,
    "model.critic_checkpoint": HAS_ITS_OWN,
    "data.train_path": HAS_ITS_OWN,
    "evaluation.path": f"{HAS_ITS_OWN}: the table shows its accuracies",
    "algorithm.stage": "the arms train policies; remove it",
    "algorithm.value_pretraining_steps": (
        "values are pretrained once for all arms of a seed, and some arms skip it; remove it"
    ),
}
"""Fields that overrides for all arms must not change, and why."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One row of a table."""

    title: str
    paper: str = ""
    """AIME 2024 avg@32 from VAPO's table 1 (arXiv 2504.05118), Qwen2.5-32B; empty: not in it."""
    changes: tuple[str, ...] = ()
    """Overrides section.field=value of this arm."""
    recipe: str | None = None
    """A file of examples/configs/algorithms, applied before the changes."""
    options: tuple[str, ...] = ()
    """Options of the table's trainer."""
    policy_steps: int | None = None
    """Length of its runs; None: the table's."""
    evaluated_every: int | None = None
    """Policy steps between its evaluations; None: the table's."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Arms to compare, and their shared settings."""

    task: str
    """Form of the task."""
    configs: tuple[str, ...]
    """Files in examples/configs; later ones win."""
    arms: Mapping[str, Arm]
    """By name, in the order in which they are run."""
    more_arms: Mapping[str, Arm] = dataclasses.field(default_factory=dict)
    """Variants that are run only if --arms names them."""
    has_reward_model: bool = True
    value_steps: int = 6
    """Steps of the value pretraining that makes a seed's value checkpoint. Few, because only with a
    critic that is still biased does the positive-example loss matter."""
    value_changes: tuple[str, ...] = ()
    """Overrides of the value pretraining."""
    base_sources: tuple[str, ...] = BASE_SOURCES
    base_options: tuple[str, ...] = ()
    """More options of the base model's script."""
    base_seconds: float = 120.0
    """Estimate for the base model, in the units in which a policy step takes 10."""
    data_sources: tuple[str, ...] = ("task.py",)
    """The script that writes the problems, and the files that it depends on."""
    trainer: tuple[str, ...] = ()
    """The script that trains, and the files that it depends on; empty: vapo_megatron.train."""

    @property
    def all_arms(self) -> dict[str, Arm]:
        """Arms and variants, by name."""
        return {**self.arms, **self.more_arms}


def titles(arms: Mapping[str, Arm]) -> dict[str, str]:
    """Return the arms' titles, by name."""
    return {name: arm.title for name, arm in arms.items()}


def task_table(
    form: str, script: str, configs: Sequence[str], arms: Mapping[str, Arm], *, read: int,
    updates: int, **more: Any,
) -> Table:  # fmt: skip
    """Return the table of a task in a folder of its own.

    Args:
        form: of the task.
        script: FOLDER/FILE, which writes the problems; FOLDER/base.py makes the base model.
        configs: after tiny.yaml.
        arms: by name.
        read: responses that the critic learns from in value pretraining.
        updates: its passes over them.
        more: other fields of Table.
    """
    base = f"{script.partition('/')[0]}/base.py"
    own = {
        "has_reward_model": False,
        # One step: all responses are there to be read several times.
        "value_steps": 1,
        "value_changes": (
            f"algorithm.responses_per_step={read}", f"algorithm.critic_updates_per_step={updates}",
        ),
        "base_sources": (base, "make_tokenizer.py", "making.py", "architecture.py", script),
        "data_sources": (script,),
    }  # fmt: skip
    return Table(form, ("tiny.yaml", *configs), arms, **{**own, **more})


def seed_jobs(
    root: Path, table: Table, seed: int, arms: Mapping[str, Arm], more: Sequence[str],
    prefix: str = "",
) -> list[Job]:  # fmt: skip
    """Return the jobs of a seed's arms and their dependencies, dependencies first.

    Args:
        root: directory of the table.
        table: of the arms.
        seed: of models, problems and runs.
        arms: by name.
        more: overrides of all arms and of the value stage.
        prefix: of the jobs' names.

    Raises:
        UserError: invalid settings of an arm, or `more` changes a field of NOT_FOR_ALL.
    """
    jobs = Seed(root, seed, prefix)
    out, task = jobs.out, table.task
    base, data = out / "base", out / "data"
    shared = (
        f"seed={seed}", f"model.hf_path={base}", f"data.train_path={data}/train.jsonl",
        f"evaluation.path={data}/test.jsonl",
        *([f"model.critic_hf_path={out / 'reward_model'}"] if table.has_reward_model else []),
    )  # fmt: skip
    start = f"model.critic_checkpoint={out / 'value'}"
    _require_own([CONFIGS / name for name in table.configs], (*shared, start), more)

    def add_run(name: str, arm: Arm, *own: str) -> None:
        recipe = [f"algorithms/{arm.recipe}.yaml"] if arm.recipe else []
        length = [f"algorithm.policy_steps={arm.policy_steps}"] if arm.policy_steps else []
        if arm.evaluated_every:
            length.append(f"evaluation.every_steps={arm.evaluated_every}")
        jobs.add_run(
            name, (*table.configs, *recipe), *shared, *length, *more, *own, *arm.changes,
            step_seconds=10.0, trainer=table.trainer, options=arm.options,
        )  # fmt: skip

    jobs.add_script(
        "base", table.base_sources, "--form", task, *table.base_options,
        seconds=table.base_seconds, form=" ".join([task, *table.base_options]),
    )  # fmt: skip
    jobs.add_script("data", table.data_sources, "--form", task, seconds=2.0, form=task)
    if table.has_reward_model:
        jobs.add_script(
            "reward_model", ("make_reward_model.py", "making.py", "sampling.py", "task.py"),
            "--base", base, needs=("base",), seconds=40.0, form=task,
        )  # fmt: skip
    add_run(
        "value", Arm("", changes=table.value_changes), "algorithm.stage=value_pretraining",
        "evaluation.path=null", f"algorithm.value_pretraining_steps={table.value_steps}",
    )  # fmt: skip
    for name, arm in arms.items():
        add_run(name, arm, start)
    return jobs.needed(arms)


def _require_own(files: Sequence[Path], own: Sequence[str], more: Sequence[str]) -> None:
    """Check that overrides for all arms leave the fields of NOT_FOR_ALL alone.

    Raises:
        UserError: names the field and the reason.
    """
    before, after = (
        flatten(load_config(files, overrides).model_dump()) for overrides in (own, (*own, *more))
    )
    for name, why in NOT_FOR_ALL.items():
        if after[name] != before[name]:
            value = "null" if after[name] is None else after[name]
            raise UserError(f"{name}={value} for all arms: {why}")
    if after["algorithm.policy_steps"] < 1:
        raise UserError(
            "algorithm.policy_steps=0 for all arms: the table compares trained policies; "
            "give 1 or more"
        )


def made(root: Path, table: Table, more: Sequence[str]) -> tuple[list[Job], list[str]]:
    """Find the jobs of all arms and seeds that earlier invocations have started.

    Returns:
        Jobs that were started with these settings, seed by seed; names of arms that were started
        with other settings. For the arguments see seed_jobs.
    """
    numbers = [path.name.removeprefix("seed_") for path in root.glob("seed_*")]
    found: dict[str, Job] = {}
    others = []
    for seed in sorted(int(number) for number in numbers if number.isdecimal()):
        for name, arm in table.all_arms.items():
            if not (root / f"seed_{seed}" / f"{name}.job.json").exists():
                continue
            jobs: dict[str, Job] = {}
            # These settings may be invalid for an arm that was made with others.
            with contextlib.suppress(UserError):
                jobs = {job.name: job for job in seed_jobs(root, table, seed, {name: arm}, more)}
            own = jobs.get(f"seed_{seed}/{name}")
            if own is None or changed(own):
                others.append(f"seed_{seed}/{name}")
            else:
                found |= jobs
    return [job for job in found.values() if read_state(job) and not changed(job)], others
