"""Two whole runs, with turns and without, that sample with vLLM: the same rows and weights.

Minutes long, so outside the default run; tests/roles/test_device_schedule.py compares replays by
default, and tests/e2e/test_run.py has a run by turns. On a CPU no memory is given back: what is
proven is the order of turns, syncs and versions, and that nothing is read which sleep has lost.
"""

import pytest

from tests.e2e.test_run import TINY, ended, overrides
from tests.rollout.vllm.poisoned_sleep import poison_sleep
from tests.whole_run import measured
from vapo_megatron.cli.train import main

__all__ = ["overrides"]


def train(*arguments):
    """One rank of a run; what vLLM would lose on a GPU while it sleeps is NaN."""
    poison_sleep()
    return main(list(arguments))


@pytest.mark.slow
def test_a_run_by_turns_samples_and_learns_the_same(launch, overrides, tmp_path):
    each = ["evaluation.every_steps=1", "checkpoint.every_steps=1"]
    for name in ("false", "true"):
        more = [f"parallel.offload={name}", f"logging.run_dir={tmp_path / name}"]
        given = ["--config", str(TINY), *overrides, *each, *more]
        ended(launch(train, *given, world_size=2))
    expected = measured(tmp_path / "false")
    assert [row["step"] for row in expected] == [0, 1, 2, 3, 4]
    assert measured(tmp_path / "true") == expected
    written = tmp_path.glob("false/checkpoints/*/*/*.distcp")
    files = [p.relative_to(tmp_path / "false") for p in written]
    assert len(files) == 2 * 2 * 2  # two checkpoints, two roles, two ranks
    for file in [*files, "hf_export/model.safetensors"]:
        assert (tmp_path / "false" / file).read_bytes() == (tmp_path / "true" / file).read_bytes()
