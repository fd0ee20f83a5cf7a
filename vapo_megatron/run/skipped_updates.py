"""Dumps the responses of a step with a skipped update, so that --replay can reproduce it.

RUN/skipped/step_000007/rank_00000.safetensors    as in rollout/dump.py; never deleted
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vapo_megatron.config import VapoConfig
from vapo_megatron.data.batch import ScoredRollout
from vapo_megatron.roles.model import UpdatesSkipped
from vapo_megatron.rollout.dump import write_step


@contextlib.contextmanager
def kept_if_skipped(
    config: VapoConfig,
    step: int,
    scored: Sequence[ScoredRollout],
    note: Callable[[str], None],
) -> Iterator[dict[str, float]]:
    """Dump a step's responses if one of the updates in the body was skipped. Collective.

    Args:
        config: of the run.
        step: from 1.
        scored: responses sampled by this rank.
        note: prints a line.

    Yields:
        A dict for the metrics of the updates.

    Raises:
        UpdatesSkipped: the body's, with the step and where its responses are.
    """
    root = Path(config.logging.run_dir) / "skipped"

    def keep() -> str:
        write_step(
            root,
            step,
            scored,
            num_responses=config.algorithm.responses_per_step,
            group_size=config.algorithm.group_size,
            keep_last=step,
        )
        return f"its responses are in {root}, for --replay"

    metrics: dict[str, float] = {}
    try:
        yield metrics
    except UpdatesSkipped as error:
        raise UpdatesSkipped(
            f"step {step}: {error}; {keep()}. Restart the run to resume from its latest checkpoint"
        ) from None
    skipped = {name: int(metrics.get(f"{name}/skipped_updates", 0)) for name in ("critic", "actor")}
    if any(skipped.values()):
        counts = " and ".join(f"{count} of the {name}" for name, count in skipped.items() if count)
        note(f"step {step}: updates skipped, {counts}: not finite; {keep()}")
