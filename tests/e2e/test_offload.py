"""Two whole runs, with turns and without, that sample with vLLM: the same rows and weights.

Minutes long, so outside the default run; tests/roles/test_device_schedule.py compares replays by
default. On a CPU vLLM keeps its memory while it sleeps: what is proven is the order of turns, syncs
and versions.
"""

import pytest

from tests.e2e.test_run import TINY, overrides, rows, run, torchrun

__all__ = ["overrides"]


@pytest.mark.slow
def test_a_run_by_turns_samples_and_learns_the_same(overrides, tmp_path):
    each = ["evaluation.every_steps=1", "checkpoint.every_steps=1"]
    for name in ("false", "true"):
        more = [f"parallel.offload={name}", f"logging.run_dir={tmp_path / name}"]
        run(torchrun("-m", "vapo_megatron.train", "--config", TINY, *overrides, *each, *more))
    expected = rows(tmp_path / "false")
    assert [row["step"] for row in expected] == [0, 1, 2, 3, 4]
    assert rows(tmp_path / "true") == expected
    written = tmp_path.glob("false/checkpoints/*/*/*.distcp")
    files = [p.relative_to(tmp_path / "false") for p in written]
    assert len(files) == 2 * 2 * 2  # two checkpoints, two roles, two ranks
    for file in [*files, "hf_export/model.safetensors"]:
        assert (tmp_path / "false" / file).read_bytes() == (tmp_path / "true" / file).read_bytes()
