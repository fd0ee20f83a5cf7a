"""What a step leaves in a run's files: under which step, of which ranks, and once it is made again.

Two real processes; how much memory they hold is a stand-in's. Rows by themselves are in
tests/run/test_metrics.py, tokens of shown responses in tests/run/test_token_records.py.
"""

from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests import jsonl
from tests.dumped import GROUP_SIZE, config, rollouts

SAMPLES = 3


class Memory:
    """Of a rank; 7 or 8 bytes in each phase, 100 or 200 in all."""

    def restart(self):
        pass

    def peak_bytes(self):
        return 7 + dist.get_rank()

    def highest_bytes(self):
        return 100 * (1 + dist.get_rank())


def written(run_dir):
    """What the run's files hold."""
    names = ("metrics", "held_out", "problems", *(f"rollouts/step_00000{i}" for i in range(3)))
    files = {name: run_dir / f"{name}.jsonl" for name in names}
    return {name: jsonl.read(file) for name, file in files.items() if file.exists()}


def write(run_dir):
    """A first step; its evaluation and row made again; a second step. The files after each."""
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.exchange import gather_summary
    from vapo_megatron.rollout.source import RolloutSource
    from vapo_megatron.run import output as run_output

    class Source(RolloutSource):
        rollouts = None

    settings = config(
        Path("/nowhere"),
        parallel={"world_size": 2},
        evaluation={"samples": SAMPLES},
        logging={
            "run_dir": str(run_dir), "tensorboard": False, "progress": "off", "rollout_groups": 2,
        },
    )  # fmt: skip
    place = groups.initialize(settings.parallel)
    # The main rank has sampled the second group and the last.
    groups_of = {0: (1, 3), 1: (0, 2)}[place.rank]
    mine = [s for s in rollouts() if s.rollout.position // GROUP_SIZE in groups_of]
    summary, found, shown = gather_summary(mine, len(rollouts())), [], []
    source = Source()

    def opened(start, **how):
        with mock.patch.object(run_output, "PeakMemory", Memory):
            output = run_output.RunOutput(settings, place)
        return output, output.opened(start, **how)

    def note():
        dist.barrier()
        found.append(written(run_dir))

    output, files = opened(0)
    with files:
        shown.append(output._progress.bars.tasks[0].description)
        output.step(0, {})
        with output.phase("values"):
            pass
        output.rollouts(0, mine, summary, None, None, source)
        output.evaluation(1, [2, 0])
        times = output.step(1, {"num_tokens": 100.0})
    note()
    output, files = opened(1, is_unevaluated=True)
    with files:
        shown.append(output._progress.bars.tasks[0].description)
        output.evaluation(1, [3, 1])
        output.step(1, {"reward/mean": 0.5})
    note()
    output, files = opened(1)
    with files:
        shown.append(output._progress.bars.tasks[0].description)
        output.rollouts(1, mine, summary, None, None, source)
        output.step(2, {})
    note()
    return found, times, shown


def test_a_step_is_written_once_with_what_all_ranks_have(workers, tmp_path):
    (first, again, second), times, shown = workers.run(2, write, tmp_path)[0]
    assert [words.split()[1] for words in shown] == ["1", "2", "2"], "a resume goes on counting"
    assert [row["step"] for row in first["metrics"]] == [0, 1]
    row = first["metrics"][1]
    assert row["memory/peak_bytes"] == 100 + 200 and row["memory/values_peak_bytes"] == 8
    assert row["tokens_per_second"] == pytest.approx(100 / times["time/step_seconds"])
    held_out = {"step": 1, "group_size": SAMPLES, "problems": [0, 1]}
    assert first["held_out"] == [{**held_out, "correct": [2, 0]}]

    right = [s.is_correct for s in rollouts()]
    correct = [sum(right[i : i + GROUP_SIZE]) for i in range(0, len(right), GROUP_SIZE)]
    problems = {"group_size": GROUP_SIZE, "problems": [0, 1, 2, 0], "correct": correct}
    assert first["problems"] == [{"step": 1, **problems}]
    # The first is the other rank's, the second the main rank's.
    groups = first.pop("rollouts/step_000001")
    texts = [[r["text"] for r in group["responses"]] for group in groups]
    assert texts == [[s.text for s in rollouts()[at : at + GROUP_SIZE]] for at in (0, GROUP_SIZE)]
    assert first.keys() == {"metrics", "held_out", "problems"}

    # The row lacked its evaluation; the step itself is not made again.
    assert [row["step"] for row in again["metrics"]] == [0, 1]
    assert again["metrics"][1]["reward/mean"] == 0.5
    assert again["held_out"] == [{**held_out, "correct": [3, 1]}]
    assert again["problems"] == first["problems"] and again["rollouts/step_000001"] == groups

    assert second["metrics"][:2] == again["metrics"] and second["metrics"][2]["step"] == 2
    assert second["problems"] == [{"step": 1, **problems}, {"step": 2, **problems}]
    assert second["rollouts/step_000002"] == groups
