"""Where a value model pays over turns: VAPO, PPO, DAPO and GRPO on turns with luck.

    bash examples/run_turns_tiny.sh [--seeds 0 1 2 3 4] [--quick]

Every seed has a base model and a pretrained critic of its own, which its arms share. Ends with
table.md: held-out accuracy by step, how well advantages credit the choices, and what the critic
explains by turn. If interrupted, the same command resumes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ablation.arms import NO_VALUE_CHECKPOINT, VAPO
from runner import command, tables
from runner.arms import Arm, Table, seed_jobs
from runner.jobs import finished
from runner.tables import Cell, Runs, accuracies

from turns import luck
from vapo_megatron.data.storage import replace_file
from vapo_megatron.run.directory import read_rows

STEPS, PER_STEP, READ = 30, 64, 1024
"""Policy steps, their responses, and responses that the critic has read before. Arms without one
train on as many more, so that all have the same number."""
IN_TOKENS = "algorithm.gae_unit=token"
ARMS = {
    "vapo": VAPO,
    "lambda_1": Arm("with lambda 1", changes=("algorithm.lambda_actor=1.0",)),
    "token": Arm("with GAE over tokens", changes=(IN_TOKENS,)),
    **{
        recipe: Arm(
            title,
            "",
            # What dynamic sampling throws away would be more tokens than the others' sample.
            (NO_VALUE_CHECKPOINT, IN_TOKENS, "algorithm.dynamic_sampling=false"),
            recipe,
            policy_steps=STEPS + READ // PER_STEP,
        )
        for recipe, title in (
            ("ppo", "vanilla PPO"), ("dapo", "DAPO without dynamic sampling"), ("grpo", "GRPO"),
        )
    },
}  # fmt: skip
TABLE = Table(
    "luck",
    configs=("tiny.yaml", "turns_tiny.yaml"),
    arms=ARMS,
    has_reward_model=False,
    # One step: all responses are there to be read several times.
    value_steps=1,
    value_changes=(f"algorithm.responses_per_step={READ}", "algorithm.critic_updates_per_step=5"),
    base_sources=(
        "turns/base.py",
        "make_tokenizer.py",
        "making.py",
        "architecture.py",
        "turns/luck.py",
    ),
    base_seconds=100.0,
    data_sources=("turns/luck.py",),
    trainer=("turns/train.py", "turns/luck.py"),
)
TURNS = (1, 4, 8, 12, 16)
Result = Mapping[str, Any]
"""metrics and credit: rows of the files of a run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs and write the table; return 1 if a job failed."""
    out = "runs/turns_tiny, with --quick runs/turns_quick"
    parser = command.options("turns", __doc__, out)
    command.add_seeds(parser, 5)
    parser.add_argument(
        "--quick", action="store_true", help="one seed of VAPO and GRPO, 5 policy steps"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="for all arms")
    return command.main("turns", parser, plan, arguments)


def plan(args: argparse.Namespace) -> command.Plan:
    """Return what the arguments ask for."""
    root = (args.out or Path("runs/turns_quick" if args.quick else "runs/turns_tiny")).resolve()
    seeds, arms, more = args.seeds, dict(ARMS), list(args.overrides)
    if args.quick:
        seeds, arms = seeds[:1], {name: ARMS[name] for name in ("vapo", "grpo")}
        more += ["algorithm.policy_steps=5", "evaluation.every_steps=5"]
    jobs = [job for seed in sorted(set(seeds)) for job in seed_jobs(root, TABLE, seed, arms, more)]

    def write() -> str | None:
        runs = {
            name: {seed: _result(job.out) for seed, job in of_seeds.items()}
            for name, of_seeds in finished(jobs, arms).items()
        }
        titles = {name: arms[name].title for name in arms if name in runs}
        if not titles:
            return None
        best = luck.chance_of_goal(luck.GOOD)[luck.TURNS][0]
        text = (
            f"{tables.of_arms('arm', titles, columns(runs), runs)}\n"
            f"The best possible accuracy is {best:.3f}.\n\n"
            f"{tables.of_arms('explained variance by turn', titles, by_turn(), runs)}"
        )
        replace_file(root / "table.md", text)
        return f"{text}\n{root / 'table.md'}"

    return command.Plan(root, jobs, write, modules=("ablation", "turns"))


def _result(out: Path) -> Result:
    return {"metrics": read_rows(out / "metrics.jsonl"), "credit": read_rows(out / luck.FILE)}


def columns(runs: Runs) -> dict[str, Cell]:
    """Return the columns of accuracies, at the steps that all runs have, and of credit."""
    steps = sorted(
        set.intersection(
            *({step for step, _ in accuracies(r["metrics"])} for of in runs.values()
              for r in of.values())
        )
    )  # fmt: skip

    def at(step: float) -> tables.Measure:
        return lambda result: dict(accuracies(result["metrics"]))[step]

    found = {f"after {step:g} steps" if step else "before": tables.mean(at(step)) for step in steps}
    found["in the end"] = tables.mean(_last)
    found["each seed"] = tables.each(_last)
    found["less the first arm"] = tables.difference(_last)
    found["good choices"] = tables.mean(lambda r: r["credit"][-1]["good_choices"])
    found["correlation"] = tables.mean(lambda r: _mean(r["credit"][:10], "correlation"), ".2f")
    return found


def _last(result: Result) -> float:
    return accuracies(result["metrics"])[-1][1]


def by_turn() -> dict[str, Cell]:
    """Return the columns of what the critic, and exact values, explain of the rewards."""

    def at(name: str, turn: int) -> tables.Measure:
        def measure(result: Result) -> float | None:
            rows = [row[name][turn - 1] for row in result["credit"][-10:] if row[name]]
            rows = [value for value in rows if value is not None]
            return statistics.fmean(rows) if rows else None

        return measure

    found = {f"turn {turn}": tables.mean(at("explained", turn), ".2f") for turn in TURNS}
    return found | {
        f"exact, {turn}": tables.mean(at("best_explained", turn), ".2f") for turn in TURNS
    }


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [row[name] for row in rows if row[name] is not None]
    return statistics.fmean(known) if known else None
