"""The concise example's jobs as data: commands, dependencies, and the settings they depend on.

OUT/seed_0/base, data         base model; train.jsonl, pool.jsonl and test.jsonl
OUT/seed_0/first              run directory of the first phase; its hf_export is the trained policy
OUT/seed_0/sometimes, never   problems of pool.jsonl, chosen by vapo select with the trained policy
OUT/seed_0/before             the trained policy's samples of test.jsonl
OUT/seed_0/second_SET         run directory of the second phase on a set of problems
OUT/seed_0/after_SET          samples of test.jsonl after it
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ablation_jobs import FILES, NO_EFFECT, TINY, Job, digest

from vapo_megatron.config import load_config
from vapo_megatron.run.report.comparison import flatten

FEW = 8
"""Problems of a small set; the paper has 4 or 8."""
SAMPLES = "samples.jsonl"
CHOSEN = "problems.parquet"


@dataclasses.dataclass(frozen=True)
class Problems:
    """A set of problems for the second phase."""

    title: str
    sources: Mapping[str, str]
    """Job that makes it -> file in its directory; of two, a step has as many of either."""
    prompts: int = FEW
    """Problems of a step."""


SETS = {
    "sometimes": Problems(f"{FEW} problems, sometimes solved", {"sometimes": CHOSEN}),
    "full": Problems("all problems, a quarter never solved", {"data": "train.jsonl"}, prompts=64),
    "half": Problems(
        f"{FEW} problems sometimes, {FEW} never solved", {"sometimes": CHOSEN, "never": CHOSEN}
    ),
    "never": Problems(f"{FEW} problems, never solved", {"never": CHOSEN}),
}
MAIN = "sometimes"
"""The paper's second phase; the other sets show what the solvability of the problems does."""

# Chosen with seed 0. A first phase of 4 steps leaves problems that are not always solved. With the
# first phase's learning rates, 5e-4, the second also drops steps that are needed; with these it
# does so after 12 steps: held-out accuracy is .967 before, .988 at step 8, .978 at 12, .956 at 16.
# SOMETIMES was chosen with seed 1, whose first phase leaves problems with lower pass rates: on the
# hardest of all that are sometimes solved (.19 to .69) a third of the rewards stays negative, and
# accuracy falls by .028.
FIRST = ("algorithm.group_size=16",)
SOMETIMES = ("0.7", "0.95")
"""Pass rates of the few problems."""
SECOND = ("optimizer.actor_learning_rate=2e-4", "optimizer.critic_learning_rate=2e-4")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is done."""

    first_steps: int = 4
    second_steps: int = 12
    responses: int = 256
    """Of a step, in mini-batches of a quarter."""
    pool: int = 256
    pool_samples: int = 16
    test: int = 256
    samples: int = 32
    """Responses to each held-out problem, before and after."""
    control_samples: int = 8
    """The same after the second phase on the sets other than MAIN."""


WHOLE = Sizes()
QUICK = Sizes(
    first_steps=3, second_steps=2, responses=128, pool=64, pool_samples=8, test=32, samples=2,
    control_samples=1,
)  # fmt: skip


def seed_jobs(root: Path, seed: int, sizes: Sizes) -> list[Job]:
    """Return a seed's jobs, dependencies first.

    Args:
        root: directory of the example.
        seed: of models, problems, runs and evaluations.
        sizes: how much is done.
    """
    jobs = _Jobs(root / f"seed_{seed}", seed, sizes)
    of_base = (
        "concise_base.py", "make_base_model.py", "make_tokenizer.py", "making.py", "skill.py",
        "task.py",
    )  # fmt: skip
    jobs.add_script("base", of_base, "model", "--seed", seed)
    counts = ("--pool", sizes.pool, "--test", sizes.test)
    jobs.add_script("data", (of_base[0], "task.py"), "problems", "--seed", seed, *counts)
    out = jobs.out
    jobs.add_run(
        "first", ("base", "data"), "dapo", f"algorithm.policy_steps={sizes.first_steps}",
        f"model.hf_path={out / 'base'}", f"data.train_path={out / 'data/train.jsonl'}", *FIRST,
    )  # fmt: skip
    jobs.add_selection("sometimes", *SOMETIMES)
    jobs.add_selection("never", "0", "0")
    jobs.add_evaluation("before", "first", sizes.samples)
    for name, problems in SETS.items():
        jobs.add_run(
            f"second_{name}", ("first", *problems.sources), "concise",
            f"algorithm.policy_steps={sizes.second_steps}",
            f"algorithm.group_size={sizes.responses // problems.prompts}",
            f"model.hf_path={out / 'first/hf_export'}", *_data(out, problems.sources), *SECOND,
        )  # fmt: skip
        count = sizes.samples if name == MAIN else sizes.control_samples
        jobs.add_evaluation(f"after_{name}", f"second_{name}", count)
    return list(jobs.by_name.values())


class _Jobs:
    """Collects a seed's jobs."""

    def __init__(self, out: Path, seed: int, sizes: Sizes) -> None:
        self.out, self.seed, self.sizes = out, seed, sizes
        self.by_name: dict[str, Job] = {}

    def _add(
        self, name: str, needs: Sequence[str], settings: Mapping[str, Any], **rest: Any
    ) -> None:
        made_from = {f"made from {need}": digest(self.by_name[need].settings) for need in needs}
        self.by_name[name] = Job(
            f"{self.out.name}/{name}", self.out / name, settings={**settings, **made_from},
            needs=tuple(f"{self.out.name}/{need}" for need in needs), **rest,
        )  # fmt: skip

    def add_script(self, name: str, sources: Sequence[str], *rest: object) -> None:
        """Add a script of this directory; sources: itself, and what its output depends on."""
        arguments, out = list(map(str, rest)), str(self.out / name)
        settings = {s: hashlib.sha256((TINY / s).read_bytes()).hexdigest()[:12] for s in sources}
        self._add(
            name, (), settings | {"arguments": " ".join(arguments)},
            command=(sys.executable, str(TINY / sources[0]), *arguments, "--out", out),
            estimate_seconds=60.0 if name == "base" else 4.0,
        )  # fmt: skip

    def add_run(self, name: str, needs: Sequence[str], recipe: str, *own: str) -> None:
        """Add a training run; recipe: a file of algorithms/, own: overrides."""
        configs = ("tiny.yaml", "concise_tiny.yaml", f"algorithms/{recipe}.yaml")
        files = [FILES / config for config in configs]
        overrides = (
            f"seed={self.seed}", f"logging.run_dir={self.out / name}",
            f"algorithm.responses_per_step={self.sizes.responses}",
            f"algorithm.mini_batch_size={self.sizes.responses // 4}", *own,
        )  # fmt: skip
        config = load_config(files, overrides)
        command = [sys.executable, "-m", "vapo_megatron.train"]
        command += [part for file in files for part in ("--config", str(file))]
        steps = config.algorithm.num_steps
        self._add(
            name, needs, _effective(config.model_dump(), self.out),
            command=(*command, *overrides), num_steps=steps, estimate_seconds=20.0 + 3.0 * steps,
        )  # fmt: skip

    def add_evaluation(self, name: str, run: str, samples: int) -> None:
        """Add an evaluation of a run on the held-out problems."""
        command = (
            sys.executable, "-m", "vapo_megatron", "evaluate",
            "--checkpoint", str(self.out / run), "--data", str(self.out / "data/test.jsonl"),
            "--samples", str(samples), "--out", str(self.out / name / SAMPLES),
        )  # fmt: skip
        self._add(
            name, (run, "data"), {"samples": samples}, command=command,
            estimate_seconds=15.0 + samples,
        )  # fmt: skip

    def add_selection(self, name: str, low: str, high: str) -> None:
        """Add the choice of FEW problems whose pass rate lies in [low, high], the hardest ones."""
        rules = ("--pass-rate", low, high, "--hardest", str(FEW))
        sampling = ("--samples", str(self.sizes.pool_samples))
        command = (
            sys.executable, "-m", "vapo_megatron", "select",
            "--checkpoint", str(self.out / "first"), "--data", str(self.out / "data/pool.jsonl"),
            "--out", str(self.out / name / CHOSEN), *sampling, *rules,
        )  # fmt: skip
        settings = {"arguments": " ".join((*sampling, *rules))}
        self._add(
            name, ("first", "data"), settings, command=command,
            estimate_seconds=15.0 + self.sizes.pool_samples,
        )  # fmt: skip


def _data(out: Path, sources: Mapping[str, str]) -> list[str]:
    """Return the overrides that name a set of problems."""
    paths = {name: str(out / name / file) for name, file in sources.items()}
    if len(paths) == 1:
        return [f"data.train_path={path}" for path in paths.values()]
    named = json.dumps({name: {"path": path} for name, path in paths.items()})
    return ["data.train_path=null", f"data.sources={named}"]


def _effective(config: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Fields that affect results; paths relative to the seed's directory."""
    fields = {n: v for n, v in flatten(config).items() if not n.startswith(NO_EFFECT)}
    return json.loads(json.dumps(fields).replace(f"{out}/", ""))
