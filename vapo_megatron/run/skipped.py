"""Keeps the responses of a step whose update was skipped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from vapo_megatron.roles.trained import UpdatesSkipped


@contextlib.contextmanager
def kept_if_skipped(
    run_dir: Path,
    step: int,
    dump: Callable[..., None],
    note: Callable[[str], None],
) -> Iterator[dict[str, float]]:
    """Dump a step's responses if an update in the body was skipped, for --replay. Collective.

    They go to RUN/skipped/step_*/, as in rollout/dump.py, and are never deleted.

    Args:
        run_dir: of the run.
        step: from 1.
        dump: RolloutSource.dump with the step's responses.
        note: prints a line.

    Yields:
        A dict for the metrics of the updates.

    Raises:
        UpdatesSkipped: the body's, with the step and where its responses are.
    """
    root = run_dir / "skipped"

    def keep() -> str:
        dump(root, step - 1, keep_last=step)
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
