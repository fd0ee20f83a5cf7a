"""Train on turns with luck, as `python -m vapo_megatron.train`, and measure credit in every step.

    python examples/tiny/turns/train.py --config FILE ... [section.field=value ...]

Writes RUN/credit.jsonl beside what a run writes; `credit` says what is in it. One process only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from turns import luck
from vapo_megatron.cli.command import Parser
from vapo_megatron.cli.preflight import check_inputs
from vapo_megatron.config import load_config
from vapo_megatron.data.batch import RolloutBatch, StepSummary
from vapo_megatron.data.rollout import ScoredRollout
from vapo_megatron.data.storage import replace_file, to_line
from vapo_megatron.errors import UserError, tell
from vapo_megatron.parallel.environment import check_processes
from vapo_megatron.parallel.health import early_stop
from vapo_megatron.rollout.source import Decode
from vapo_megatron.run.directory import read_rows
from vapo_megatron.training.loop import VapoTrainer
from vapo_megatron.training.step import StepData

Floats = np.ndarray[Any, np.dtype[np.float64]]


class LuckTrainer(VapoTrainer):
    """Compares each step's advantages and values with the exact ones."""

    _step = 0

    def prepare(self, step: int) -> StepData:
        """See StepTrainer."""
        self._step = step + 1
        return super().prepare(step)

    def with_advantages(
        self, scored: Sequence[ScoredRollout], summary: StepSummary, batch: RolloutBatch
    ) -> RolloutBatch:
        """See StepTrainer; writes the step's credit."""
        batch = super().with_advantages(scored, summary, batch)
        decode, by_position = self.source.decode, {s.rollout.position: s for s in scored}
        assert decode is not None and batch.old_logprobs is not None
        # What a limit has cut is left out; the others have all turns.
        whole = [
            (by_position[position], start)
            for position, start in zip(batch.positions.tolist(), batch.cu_seqlens.tolist())
            if len(by_position[position].rollout.turns) == luck.TURNS
        ]
        tokens = [[start + at for at in first_tokens(s)] for s, start in whole]
        first = np.array(tokens, np.int64).reshape(-1, luck.TURNS)
        of_choices = [
            None if column is None else column.double().numpy()[first]
            for column in (batch.old_logprobs, batch.advantages, batch.values)
        ]
        found = credit(
            [observations(s, decode) for s, _ in whole], [choices(s, decode) for s, _ in whole],
            np.array([s.total_reward for s, _ in whole]), *of_choices,
        )  # fmt: skip
        path = self.run_dir / luck.FILE
        # Rows of steps that a resumed run repeats are dropped.
        rows = read_rows(path) if path.exists() else []
        kept = [row for row in rows if row["step"] < self._step]
        replace_file(path, "".join(map(to_line, [*kept, {"step": self._step, **found}])))
        return batch


def first_tokens(scored: ScoredRollout) -> list[int]:
    """Return where each turn begins among the response tokens."""
    return [0, *(turn.end for turn in scored.rollout.turns[:-1])]


def observations(scored: ScoredRollout, decode: Decode) -> list[str]:
    """Return what was seen before each turn."""
    rollout = scored.rollout
    inserted = [decode(tuple(ids)) for _, ids in rollout.inserted]
    return [decode(rollout.prompt.token_ids).removeprefix(luck.PROMPT), *inserted]


def choices(scored: ScoredRollout, decode: Decode) -> list[str]:
    """Return the first token of each turn."""
    return [decode((scored.rollout.token_ids[at],)) for at in first_tokens(scored)]


def credit(
    seen: Sequence[Sequence[str]],
    chosen: Sequence[Sequence[str]],
    rewards: Floats,
    logprobs: Floats,
    advantages: Floats,
    values: Floats | None,
) -> dict[str, Any]:
    """Compare episodes with the exact values under the policy that sampled them.

    A policy that chooses well with probability p_k in situation k succeeds in such a turn with
    q_k = p_k GOOD + (1 - p_k) BAD, and in any with the mean q. With s successes so far and n turns
    after this one

        V'(s) = 2 P(Binomial(n, q) >= GOAL - s) - 1       after the turn
        V     = q_k V'(s + 1) + (1 - q_k) V'(s)           before the choice
        A     = (P(success | choice) - q_k) (V'(s + 1) - V'(s))

    Args:
        seen, chosen: observation and choice of each episode's turns.
        rewards: [B], of the episodes, -1 or 1.
        logprobs, advantages, values: [B, turns], at the choices; values None: there is no critic.

    Returns:
        good_choices: their share. correlation: of estimated and true advantages; None if one of
        them is constant. explained, best_explained: by turn, of the rewards, by the critic's values
        (None without a critic) and by the exact ones. All None without an episode.
    """
    if not len(seen):
        return dict.fromkeys(("good_choices", "correlation", "explained", "best_explained"))
    left, successes, situation = np.moveaxis(
        np.array([[_read(each) for each in of] for of in seen]), -1, 0
    )
    good = np.array([luck.good_choice(k) for k in range(len(luck.SITUATIONS))])
    is_good = np.array(chosen) == good[situation]
    of_good = np.where(is_good, np.exp(logprobs), 1 - np.exp(logprobs))
    count = np.bincount(situation.ravel(), minlength=len(good))
    total = np.bincount(situation.ravel(), of_good.ravel(), minlength=len(good))
    p = np.where(count > 0, total / np.maximum(count, 1), of_good.mean())
    q = p * luck.GOOD + (1 - p) * luck.BAD
    table = 2 * np.array(luck.chance_of_goal(float(q.mean()))) - 1
    if_success, if_not, q = table[left, successes + 1], table[left, successes], q[situation]
    true = (np.where(is_good, luck.GOOD, luck.BAD) - q) * (if_success - if_not)
    return {
        "good_choices": float(is_good.mean()),
        "correlation": _correlation(advantages.ravel(), true.ravel()),
        "explained": None if values is None else _explained(values, rewards),
        "best_explained": _explained(q * if_success + (1 - q) * if_not, rewards),
    }


def _read(observation: str) -> tuple[int, int, int]:
    left, successes, situation = observation
    return (
        luck.COUNTS.index(left), luck.COUNTS.index(successes), luck.SITUATIONS.index(situation)
    )  # fmt: skip


def _explained(values: Floats, rewards: Floats) -> list[float | None]:
    """Return the explained variance of [B] rewards by each column of [B, turns] values."""
    variance = rewards.var()
    if variance == 0:
        return [None] * values.shape[1]
    return [round(float(1 - (rewards - of).var() / variance), 4) for of in values.T]


def _correlation(first: Floats, second: Floats) -> float | None:
    if first.std() == 0 or second.std() == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train."""
    parser = Parser(prog="train.py", description=__doc__)
    parser.add_argument("--config", action="append", default=[], metavar="FILE", required=True)
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    try:
        args = parser.parse_intermixed_args(arguments)
        config = load_config(args.config, args.overrides)
        check_processes(world_size=1)
        inputs = check_inputs(config, None)
        with early_stop.signals_blocked(), LuckTrainer(config, inputs=inputs) as trainer:
            trainer.fit()
    except UserError as error:
        tell(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
