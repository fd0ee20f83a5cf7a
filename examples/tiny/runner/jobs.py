"""Jobs as data: commands, dependencies, and the settings that determine results.

OUT/seed_0/NAME             what a job writes; it resumes from there
OUT/seed_0/NAME.job.json    its settings and state
OUT/seed_0/NAME.log         its output
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from runner.samples import SAMPLES
from vapo_megatron.config import VapoConfig, load_config
from vapo_megatron.data.storage import replace_file
from vapo_megatron.errors import UserError
from vapo_megatron.run.directory import read_rows
from vapo_megatron.run.report.comparison import flatten

Found = TypeVar("Found")

TINY = Path(__file__).resolve().parents[1]
ROOT = TINY.parents[1]
CONFIGS = TINY.parent / "configs"
NO_EFFECT = ("logging.", "checkpoint.")
"""Sections that do not affect results."""
BASE_SOURCES = (
    "make_base_model.py", "make_tokenizer.py", "making.py", "architecture.py", "skill.py",
    "task.py",
)  # fmt: skip
"""The script that makes a base model, and the files that it depends on."""


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


class Seed:
    """Collects the jobs of a seed, dependencies first."""

    def __init__(self, root: Path, seed: int, prefix: str = "") -> None:
        """Root: directory of the miniature; prefix: of the jobs' names."""
        self.out, self.seed, self.prefix = root / f"seed_{seed}", seed, f"{prefix}seed_{seed}/"
        self.jobs: dict[str, Job] = {}

    def add(
        self, name: str, needs: Sequence[str], settings: Mapping[str, Any], *command: object,
        sources: Sequence[str] = (), **rest: Any,
    ) -> None:  # fmt: skip
        """Add a job.

        Args:
            name: also of its output in the seed's directory.
            needs: names of this seed's jobs that it depends on; their settings become its own.
            settings: its other settings.
            command: arguments of Python.
            sources: files of examples/tiny that its result depends on.
            rest: other fields of Job.
        """
        found = dict(settings)
        found |= {s: hashlib.sha256((TINY / s).read_bytes()).hexdigest()[:12] for s in sources}
        found |= {f"made from {need}": digest(self.jobs[need].settings) for need in needs}
        self.jobs[name] = Job(
            self.prefix + name, self.out / name, (sys.executable, *map(str, command)), found,
            tuple(self.prefix + need for need in needs), **rest,
        )  # fmt: skip

    def add_script(
        self, name: str, sources: Sequence[str], *arguments: object, needs: Sequence[str] = (),
        seconds: float, **settings: Any,
    ) -> None:  # fmt: skip
        """Add a script of examples/tiny; sources: itself, and the files that it depends on."""
        own = ("--out", self.out / name, "--seed", self.seed)
        self.add(
            name, needs, settings, TINY / sources[0], *own, *arguments, sources=sources,
            estimate_seconds=seconds,
        )  # fmt: skip

    def add_command(
        self, name: str, needs: Sequence[str], *arguments: object, seconds: float,
        sources: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Add a subcommand of vapo; its arguments are its settings.

        Args:
            name: of its directory, which the arguments give as its output.
            needs: see `add`.
            arguments: the subcommand, and what follows it.
            seconds: estimate.
            sources: see `add`.
        """
        told = " ".join(map(str, arguments)).replace(f"{self.out}/", "")
        self.add(
            name, needs, {"command": told}, "-m", "vapo_megatron", *arguments, sources=sources,
            estimate_seconds=seconds,
        )  # fmt: skip

    def add_evaluation(
        self, name: str, needs: Sequence[str], checkpoint: Path, data: Path, samples: int,
        *overrides: str, options: Sequence[str] = (), seconds: float = 25.0,
        sources: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Add vapo evaluate at temperature 1, which writes NAME/samples.jsonl.

        Args:
            name, needs, seconds, sources: see `add_command`.
            checkpoint: to evaluate.
            data: problems.
            samples: of each problem.
            overrides: section.field=value, besides the seed.
            options: others of vapo evaluate.
        """
        self.add_command(
            name, needs, "evaluate", "--checkpoint", checkpoint, "--data", data,
            "--samples", samples, "--temperature", 1, "--top-p", 1, *options,
            "--out", self.out / name / SAMPLES, *overrides, f"seed={self.seed}",
            seconds=seconds, sources=sources,
        )  # fmt: skip

    def add_run(
        self, name: str, configs: Sequence[str], *overrides: str, step_seconds: float,
        needs: Sequence[str] | None = None, trainer: Sequence[str] = (),
        options: Sequence[str] = (), sources: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Add a training run.

        Args:
            name: of the run directory.
            configs: files of examples/configs; later ones win.
            overrides: section.field=value, besides the run directory.
            step_seconds: estimate for a step.
            needs: see `add`; None: the models and problems that the configuration names.
            trainer: script that trains; none: vapo_megatron.train.
            options: of the trainer.
            sources: see `add`; the trainer is one of them.

        Raises:
            UserError: invalid settings.
        """
        files = [CONFIGS / config for config in configs]
        overrides = (*overrides, f"logging.run_dir={self.out / name}")
        config = load_config(files, overrides)
        if needs is None:
            model = config.model
            needs = ["base", "data", *(["reward_model"] if model.critic_hf_path else [])]
            needs += ["value"] if model.critic_checkpoint else []
        # The command starts torchrun.
        start = ("vapo_megatron", "train") if config.num_processes > 1 else ("vapo_megatron.train",)
        program = (TINY / trainer[0],) if trainer else ("-m", *start)
        settings = effective(config, self.out)
        settings |= {"options": " ".join(options)} if options else {}
        steps = config.algorithm.num_steps
        self.add(
            name, needs, settings, *program, *options,
            *(part for file in files for part in ("--config", file)), *overrides,
            sources=(*trainer, *sources), num_steps=steps,
            estimate_seconds=20.0 + step_seconds * steps,
        )  # fmt: skip

    def needed(self, wanted: Iterable[str]) -> list[Job]:
        """Return the jobs with these names and their dependencies, in order."""
        names = {self.prefix + name for name in wanted}
        for job in reversed(self.jobs.values()):
            names |= set(job.needs) if job.name in names else set()
        return [job for job in self.jobs.values() if job.name in names]


def engine(prompt_tokens: int, response_tokens: int) -> tuple[str, ...]:
    """Return vLLM's limits for tiny models; the arguments: tokens of a prompt and of a response."""
    return (
        f"rollout.max_prompt_tokens={prompt_tokens}",
        f"rollout.max_response_tokens={response_tokens}",
        "rollout.max_num_sequences=256", "rollout.kv_cache_bytes=67108864",
    )  # fmt: skip


@functools.cache
def _defaults() -> dict[str, Any]:
    return flatten(VapoConfig().model_dump())


def digest(settings: Mapping[str, Any]) -> str:
    """Identify settings; a field with its default does not count: a new one changes nothing."""
    defaults = _defaults()
    told = {k: v for k, v in settings.items() if k not in defaults or v != defaults[k]}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


def effective(config: VapoConfig, out: Path) -> dict[str, Any]:
    """Return the fields that affect results; paths relative to the seed's directory."""
    fields = flatten(config.model_dump())
    kept = {name: value for name, value in fields.items() if not name.startswith(NO_EFFECT)}
    return json.loads(json.dumps(kept).replace(f"{out}/", ""))


def read_state(job: Job) -> dict[str, Any] | None:
    """Return the job's state from an earlier invocation, None if there is none."""
    if not (job.state.exists() and job.out.exists()):
        return None
    return json.loads(job.state.read_text())


def is_finished(job: Job) -> bool:
    """Whether the job has completed."""
    state = read_state(job)
    return state is not None and state["finished"]


def finished(
    jobs: Iterable[Job], names: Iterable[str], prefix: str = ""
) -> dict[str, dict[int, Job]]:
    """Return finished jobs by name and seed; names without one are left out.

    Args:
        jobs: to choose from.
        names: in the order wanted.
        prefix: of the jobs' names, see `Seed`.
    """
    found: dict[str, dict[int, Job]] = {name: {} for name in names}
    for job in jobs:
        seed, _, name = job.name.removeprefix(prefix).partition("/")
        if job.name.startswith(prefix) and name in found and is_finished(job):
            found[name][int(seed.removeprefix("seed_"))] = job
    return {name: of_seeds for name, of_seeds in found.items() if of_seeds}


def results(
    jobs: Iterable[Job], names: Iterable[str], read: Callable[[Job], Found], prefix: str = ""
) -> dict[str, dict[int, Found]]:
    """Return what `read` finds in each job of `finished`, by name and seed."""
    done = finished(jobs, names, prefix)
    return {name: {seed: read(job) for seed, job in of.items()} for name, of in done.items()}


def metrics(job: Job) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl."""
    return read_rows(job.out / "metrics.jsonl")


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
    before = {k: v for k, v in _defaults().items() if k in job.settings} | state["settings"]
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
