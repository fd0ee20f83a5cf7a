"""The ablation's jobs as data: commands, dependencies, and the settings that determine results.

OUT/seed_0/base, data, reward_model     shared by the arms of a seed
OUT/seed_0/value                        value pretraining run: the arms' initial critic
OUT/seed_0/ARM                          run directory of an arm
OUT/seed_0/NAME.job.json                settings and state of each of these
OUT/seed_0/NAME.log                     its output
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ablation_arms import TABLES, Arm, Table

from vapo_megatron.config import VapoConfig, load_config
from vapo_megatron.data.storage import replace_file
from vapo_megatron.errors import UserError
from vapo_megatron.run.report.comparison import flatten

TINY = Path(__file__).resolve().parent
FILES = TINY.parent / "configs"
NO_EFFECT = ("logging.", "checkpoint.")
"""Sections that do not affect results."""
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
class Job:
    """One process and its output."""

    name: str
    """For example seed_0/vapo."""
    out: Path
    """Its output directory, from which it also resumes."""
    command: tuple[str, ...]
    settings: Mapping[str, Any]
    """Settings that its result depends on, by name."""
    needs: tuple[str, ...] = ()
    """Names of the jobs that it depends on."""
    num_steps: int = 0
    """Rows of its complete metrics.jsonl; 0: it writes none."""
    estimate_seconds: float = 60.0
    """Initial estimate; once jobs are measured, only the ratios between jobs matter."""

    @property
    def log(self) -> Path:
        """File with its output."""
        return self.out.with_name(f"{self.out.name}.log")

    @property
    def state(self) -> Path:
        """File with its settings, seconds taken, and whether it is finished."""
        return self.out.with_name(f"{self.out.name}.job.json")


def arms_by_name(form: str, names: Sequence[str]) -> dict[str, Arm]:
    """Return the named arms, or all arms of the table if none is named.

    Raises:
        UserError: an unknown name.
    """
    table = TABLES[form]
    known = {**table.arms, **table.more_arms}
    for name in names:
        if name not in known:
            raise UserError(
                f"--arms {name}: no such arm with --form {form}; known: {', '.join(known)}"
            )
    return {name: known[name] for name in names} if names else dict(table.arms)


def seed_jobs(
    root: Path, form: str, seed: int, arms: Mapping[str, Arm], more: Sequence[str]
) -> list[Job]:
    """Return the jobs of a seed's arms and their dependencies, dependencies first.

    Args:
        root: directory of the ablation.
        form: of the task; selects the table.
        seed: of models, problems and runs.
        arms: by name.
        more: overrides of all arms and of the value stage.

    Raises:
        UserError: invalid settings of an arm, or `more` changes a field of NOT_FOR_ALL.
    """
    prefix, out = f"seed_{seed}", root / f"seed_{seed}"
    table = TABLES[form]
    task = table.task or form
    base, data, reward = out / "base", out / "data", out / "reward_model"
    shared = (
        f"seed={seed}", f"model.hf_path={base}", f"data.train_path={data}/train.jsonl",
        f"evaluation.path={data}/test.jsonl",
        *([f"model.critic_hf_path={reward}"] if table.has_reward_model else []),
    )  # fmt: skip
    start = f"model.critic_checkpoint={out / 'value'}"
    _require_own([FILES / name for name in table.configs], (*shared, start), more)
    jobs: dict[str, Job] = {}

    def add(name: str, needs: Sequence[str], settings: Mapping[str, Any], **rest: Any) -> None:
        made_from = {f"made from {need}": digest(jobs[need].settings) for need in needs}
        jobs[name] = Job(
            f"{prefix}/{name}", out / name, settings={**settings, **made_from},
            needs=tuple(f"{prefix}/{need}" for need in needs), **rest,
        )  # fmt: skip

    def add_script(
        name: str, needs: Sequence[str], sources: Sequence[str], *rest: object, seconds: float
    ) -> None:
        settings = {"form": task, **_digests(sources)}
        arguments = ("--out", out / name, "--seed", seed, *rest)
        command = (sys.executable, str(TINY / sources[0]), *map(str, arguments))
        add(name, needs, settings, command=command, estimate_seconds=seconds)

    def add_run(name: str, arm: Arm, *own: str) -> None:
        recipe = [f"algorithms/{arm.recipe}.yaml"] if arm.recipe else []
        files = [FILES / name for name in (*table.configs, *recipe)]
        length = [f"algorithm.policy_steps={arm.policy_steps}"] if arm.policy_steps else []
        if arm.evaluated_every:
            length.append(f"evaluation.every_steps={arm.evaluated_every}")
        overrides = (*shared, *length, *more, *own, *arm.changes, f"logging.run_dir={out / name}")
        config = load_config(files, overrides)
        needs = ["base", "data", *(["reward_model"] if config.model.critic_hf_path else [])]
        needs += ["value"] if config.model.critic_checkpoint else []
        command = [sys.executable, *_trainer(table, config.num_processes), *arm.options]
        command += [part for file in files for part in ("--config", str(file))]
        steps = config.algorithm.num_steps
        settings = effective(config, out) | _digests(table.trainer)
        settings |= {"options": " ".join(arm.options)} if arm.options else {}
        add(
            name, needs, settings, command=(*command, *overrides),
            num_steps=steps, estimate_seconds=20.0 + 10.0 * steps,
        )  # fmt: skip

    add_script("base", (), table.base_sources, "--form", task, seconds=table.base_seconds)
    add_script("data", (), table.data_sources, "--form", task, seconds=2.0)
    if table.has_reward_model:
        sources = ("make_reward_model.py", "making.py", "measure.py")
        add_script("reward_model", ("base",), sources, "--base", base, seconds=40.0)
    add_run(
        "value", Arm("", "", table.value_changes), "algorithm.stage=value_pretraining",
        "evaluation.path=null", f"algorithm.value_pretraining_steps={table.value_steps}",
    )  # fmt: skip
    for name, arm in arms.items():
        add_run(name, arm, start)
    return _needed(jobs, [f"{prefix}/{name}" for name in arms])


def _trainer(table: Table, num_processes: int) -> list[str]:
    """Return the arguments of Python that start the table's trainer."""
    if table.trainer:
        return [str(TINY / table.trainer[0])]
    # The command starts torchrun.
    return ["-m", "vapo_megatron", "train"] if num_processes > 1 else ["-m", "vapo_megatron.train"]


def _digests(sources: Sequence[str]) -> dict[str, str]:
    """Identify the contents of files of this directory."""
    return {s: hashlib.sha256((TINY / s).read_bytes()).hexdigest()[:12] for s in sources}


def _needed(jobs: Mapping[str, Job], wanted: Iterable[str]) -> list[Job]:
    """Return the jobs with these names and their dependencies, in order."""
    names = set(wanted)
    for job in reversed(jobs.values()):
        names |= set(job.needs) if job.name in names else set()
    return [job for job in jobs.values() if job.name in names]


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


def made(root: Path, form: str, more: Sequence[str]) -> tuple[list[Job], list[str]]:
    """Find the jobs of all arms and seeds that earlier invocations have started.

    Args:
        root: directory of the ablation.
        form: of the task; selects the table.
        more: overrides for all arms.

    Returns:
        Jobs that were started with these settings, seed by seed; names of arms that were started
        with other settings.
    """
    table = TABLES[form]
    numbers = [path.name.removeprefix("seed_") for path in root.glob("seed_*")]
    found: dict[str, Job] = {}
    others = []
    for seed in sorted(int(number) for number in numbers if number.isdecimal()):
        for name, arm in {**table.arms, **table.more_arms}.items():
            if not (root / f"seed_{seed}" / f"{name}.job.json").exists():
                continue
            jobs: dict[str, Job] = {}
            # These settings may be invalid for an arm that was made with others.
            with contextlib.suppress(UserError):
                jobs = {job.name: job for job in seed_jobs(root, form, seed, {name: arm}, more)}
            own = jobs.get(f"seed_{seed}/{name}")
            if own is None or changed(own):
                others.append(f"seed_{seed}/{name}")
            else:
                found |= jobs
    return [job for job in found.values() if read_state(job) and not changed(job)], others


def digest(settings: Mapping[str, Any]) -> str:
    """Identify settings; a field with its default does not count: a new one changes nothing."""
    defaults = flatten(VapoConfig().model_dump())
    told = {k: v for k, v in settings.items() if k not in defaults or v != defaults[k]}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


def effective(config: VapoConfig, out: Path) -> dict[str, Any]:
    """Return the fields that affect results; paths relative to the seed's directory."""
    return {
        name: value.replace(f"{out}/", "") if isinstance(value, str) else value
        for name, value in flatten(config.model_dump()).items()
        if not name.startswith(NO_EFFECT)
    }


def read_state(job: Job) -> dict[str, Any] | None:
    """Return the job's state from an earlier invocation, None if there is none."""
    if not (job.state.exists() and job.out.exists()):
        return None
    return json.loads(job.state.read_text())


def is_finished(job: Job) -> bool:
    """Whether the job has completed."""
    state = read_state(job)
    return state is not None and state["finished"]


def write_state(job: Job, *, finished: bool, seconds: float) -> None:
    """Write the job's settings, whether it is finished, and the seconds taken so far."""
    state = {"finished": finished, "seconds": round(seconds, 1), "settings": dict(job.settings)}
    job.state.parent.mkdir(parents=True, exist_ok=True)
    replace_file(job.state, json.dumps(state, indent=1) + "\n")


def changed(job: Job) -> list[str]:
    """Return the differences between the job's settings and those its directory was made with."""
    state = read_state(job)
    if state is None:
        return []
    # A field added since then had its default value.
    before = {k: v for k, v in flatten(VapoConfig().model_dump()).items() if k in job.settings}
    before |= state["settings"]
    return [
        f"{name} is {job.settings.get(name)}, was {before.get(name)}"
        for name in dict.fromkeys((*job.settings, *before))
        if job.settings.get(name) != before.get(name)
    ]


def require_unchanged(jobs: Sequence[Job], *, rerun: bool) -> None:
    """Check that existing directories have the same settings; with `rerun` remove others.

    Raises:
        UserError: names the changed settings and the remedy.
    """
    found = [(job, differences) for job in jobs if (differences := changed(job))]
    if found and not rerun:
        job, differences = found[0]
        more = f" (and {len(found) - 1} more directories)" if len(found) > 1 else ""
        raise UserError(
            f"{job.out} was made with other settings: {'; '.join(differences)}{more}; "
            "redo them with --rerun, or keep them and give another --out"
        )
    for job, _ in found:
        shutil.rmtree(job.out, ignore_errors=True)
        job.state.unlink()
