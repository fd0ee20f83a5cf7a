"""Train on locks and keys, as `python -m vapo_megatron.train`, and measure credit in every step.

    python examples/tiny/credit/train.py --config FILE ... [--oracle] [section.field=value ...]

Writes RUN/credit.jsonl (measures.py) beside what a run writes. With --oracle the exact values
under the current policy take the place of the critic's when advantages are computed: the ceiling
of what a critic can give. The critic is trained as ever, and not used. One process only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # Of keys:Judge.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from credit.keys import read_problem
from credit.measures import FILE, Exact, Response, credit, exact, row
from vapo_megatron.cli.command import Parser
from vapo_megatron.cli.preflight import check_inputs
from vapo_megatron.config import VapoConfig, load_config
from vapo_megatron.data.batch import RolloutBatch, StepSummary
from vapo_megatron.data.rollout import ScoredRollout
from vapo_megatron.data.storage import replace_file, to_line
from vapo_megatron.errors import ConfigError, UserError, tell
from vapo_megatron.parallel.environment import check_processes
from vapo_megatron.parallel.health import early_stop
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.run.directory import read_rows
from vapo_megatron.training.loop import VapoTrainer
from vapo_megatron.training.step import StepData


class KeysTrainer(VapoTrainer):
    """Compares each step's advantages with the exact ones; with an oracle, uses exact values."""

    def __init__(self, config: VapoConfig, inputs: Inputs | None = None, *, oracle: bool) -> None:
        super().__init__(config, inputs=inputs)
        self._oracle = oracle
        self._step = 0

    def prepare(self, step: int) -> StepData:
        """See StepTrainer."""
        self._step = step + 1
        return super().prepare(step)

    def with_advantages(
        self, scored: Sequence[ScoredRollout], summary: StepSummary, batch: RolloutBatch
    ) -> RolloutBatch:
        """See StepTrainer; writes the step's credit."""
        known = exact(self._responses(scored, batch))
        if self._oracle:
            batch = batch.replace(values=_joined(known))
        batch = super().with_advantages(scored, summary, batch)
        found = credit(self._responses(scored, batch), known)
        path = self.run_dir / FILE
        # Rows of steps that a resumed run repeats are dropped.
        rows = read_rows(path) if path.exists() else []
        kept = [r for r in rows if r["step"] < self._step]
        replace_file(path, "".join(map(to_line, [*kept, row(self._step, found)])))
        return batch

    def _responses(self, scored: Sequence[ScoredRollout], batch: RolloutBatch) -> list[Response]:
        """Return the batch's responses, in its order."""
        decode = self.source.decode
        assert batch.old_logprobs is not None and decode is not None
        by_position = {s.rollout.position: s.rollout for s in scored}
        sizes = batch.response_lengths.tolist()

        def parts(numbers: torch.Tensor | None) -> list:
            if numbers is None:
                return [None] * len(sizes)
            return [part.double().numpy() for part in numbers.split(sizes)]

        columns = map(parts, (batch.old_logprobs, batch.advantages, batch.values))
        return [
            Response(
                read_problem(by_position[position].prompt.text),
                [decode((token,)) for token in by_position[position].token_ids],
                reward, *arrays,
            )
            for position, reward, *arrays in zip(
                batch.positions.tolist(), batch.rewards.tolist(), *columns, strict=True
            )
        ]  # fmt: skip


def _joined(known: Exact) -> torch.Tensor:
    return torch.cat([torch.from_numpy(v[:-1]) for v in known.values]).float()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train."""
    parser = Parser(prog="train.py", description=__doc__)
    parser.add_argument("--config", action="append", default=[], metavar="FILE", required=True)
    parser.add_argument(
        "--oracle", action="store_true", help="exact values instead of the critic's"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    try:
        _train(parser.parse_intermixed_args(arguments))
    except UserError as error:
        tell(f"error: {error}")
        return 2
    return 0


def _train(args: argparse.Namespace) -> None:
    config = load_config(args.config, args.overrides)
    if config.parallel.world_size != 1:
        raise ConfigError(
            f"parallel.world_size={config.parallel.world_size} must be 1: credit is measured in "
            "one process"
        )
    if args.oracle and "critic" not in config.algorithm.trained_roles:
        raise ConfigError("--oracle: this configuration has no critic to replace")
    check_processes(world_size=1)
    inputs = check_inputs(config, None)
    with early_stop.signals_blocked():
        with KeysTrainer(config, inputs, oracle=args.oracle) as trainer:
            trainer.fit()


if __name__ == "__main__":
    sys.exit(main())
