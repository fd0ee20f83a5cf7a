"""Shared by the miniatures of an environment: VAPO beside methods without value pretraining."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

from ablation.arms import NO_VALUE_CHECKPOINT
from runner import command
from runner.arms import Arm, Table, seed_jobs
from runner.jobs import Job

STEPS, PER_STEP = 30, 64
"""Policy steps, and their responses."""
IN_TOKENS = "algorithm.gae_unit=token"


def not_pretrained(recipes: Mapping[str, str], read: int, *changes: str) -> dict[str, Arm]:
    """Return arms that train on as many responses as VAPO and its value pretraining together.

    Args:
        recipes: title by recipe.
        read: responses of the value pretraining.
        changes: overrides of these arms.
    """
    changes, steps = (NO_VALUE_CHECKPOINT, IN_TOKENS, *changes), STEPS + read // PER_STEP
    return {
        recipe: Arm(title, "", changes, recipe, policy_steps=steps)
        for recipe, title in recipes.items()
    }


def main(
    name: str,
    description: str | None,
    arguments: Sequence[str] | None,
    table: Table,
    text: Callable[[Sequence[Job]], str],
) -> int:
    """Run a miniature; text: of table.md, see command.seeds_plan. For the rest see command.main."""

    def plan(args: argparse.Namespace) -> command.Plan:
        arms, more = dict(table.arms), list(args.overrides)
        if args.quick:
            arms = {arm: arms[arm] for arm in ("vapo", "grpo")}
            more += ["algorithm.policy_steps=5", "evaluation.every_steps=5"]
        return command.seeds_plan(
            args, name, lambda root, seed: seed_jobs(root, table, seed, arms, more), text,
            modules=("ablation", name),
        )  # fmt: skip

    parser = command.seeds_options(name, description, "one seed of VAPO and GRPO, 5 policy steps")
    command.add_overrides(parser)
    return command.main(name, parser, plan, arguments)
