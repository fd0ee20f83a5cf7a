"""Whether a run's checkpoints and its export have room on its disk, before anything starts.

The disk's numbers are made up. Not exercised: quotas, which the system does not report.
"""

import shutil
from types import SimpleNamespace

import pytest

from tests.planning.shapes import changed, make_config
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.known import known_shape
from vapo_megatron.planning.disk import check_disk, most_at_once
from vapo_megatron.planning.memory import checkpoint_bytes, export_bytes

GB = 10**9
SHAPE = known_shape("Qwen2.5-32B")
CHECKPOINT = 906_598_762_496
"""By hand in test_memory.py."""


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Return what is told of a disk; a refusal, or a list of warnings."""

    def check(free, total=9000 * GB, *, steps=100, **checkpoint):
        def disk_usage(path):
            if isinstance(free, OSError):
                raise free
            return SimpleNamespace(free=free, total=total)

        monkeypatch.setattr(shutil, "disk_usage", disk_usage)
        config = make_config(algorithm={"value_pretraining_steps": 0, "policy_steps": steps})
        logging = {"run_dir": str(tmp_path / "run")}
        config = changed(config, logging=logging, checkpoint=checkpoint)
        try:
            return check_disk(config, SHAPE)
        except ConfigError as error:
            return str(error)

    return check


def test_the_first_checkpoint_must_have_room(told, tmp_path):
    assert told(CHECKPOINT - 10 * GB) == (
        f"a checkpoint takes 907 GB, but 897 GB are free in logging.run_dir={tmp_path}/run; free "
        "10 GB, or set logging.run_dir to a directory on a larger disk"
    )
    assert isinstance(told(CHECKPOINT), list)
    # What a killed run has left is deleted before.
    left = tmp_path / "run/checkpoints/step_000010.partial/actor"
    left.mkdir(parents=True)
    (left / "file").write_bytes(b"x" * 5_000_000)
    assert isinstance(told(CHECKPOINT - 4_000_000), list)


def test_a_disk_that_says_nothing_is_not_refused(told):
    assert told(0, total=0) == told(OSError(5, "Input/output error")) == []


def test_what_is_kept_at_once_is_warned_of(told, tmp_path):
    assert told(3 * CHECKPOINT) == told(2 * CHECKPOINT, keep_last=1) == []
    (warning,) = told(3 * CHECKPOINT - 20 * GB)
    assert warning == (
        "warning: the run keeps up to 3 checkpoints of 907 GB at once (checkpoint.keep_last=2, "
        f"keep_every=0, and the one being written), but 2,700 GB are free in "
        f"logging.run_dir={tmp_path}/run; free 20 GB, or keep fewer"
    )
    # Those that are there take nothing more.
    for step in (40, 50):
        (tmp_path / f"run/checkpoints/step_{step:06d}").mkdir(parents=True)
    assert told(CHECKPOINT) == []
    assert "a checkpoint takes" in told(CHECKPOINT - 1)


def test_after_the_last_step_the_export_alone_is_needed(told, tmp_path):
    (tmp_path / "run/checkpoints/step_000100").mkdir(parents=True)
    size = 2 * 32_763_876_352
    assert export_bytes(SHAPE, make_config()) == size
    assert "the export takes 65.5 GB, but" in told(size - 1)
    assert told(size) == told(0, hf_export=False) == []


def test_frozen_attention_has_no_optimizer():
    frozen = make_config(algorithm={"freeze_critic_attention": True})
    # A layer's attention: (5120 + 2 * 1024) * 5121 + 5120 * 5120; 12 bytes of each.
    attention = 64 * (7168 * 5121 + 5120 * 5120)
    assert checkpoint_bytes(SHAPE, frozen) == pytest.approx(CHECKPOINT - 12 * attention, rel=1e-4)


@pytest.mark.parametrize(
    ("fields", "num_steps", "count"),
    [
        ({"every_steps": 10, "keep_last": 2}, 100, 3),
        ({"every_steps": 10, "keep_last": 2}, 15, 2),
        ({"every_steps": 0, "keep_last": 2}, 100, 1),
        # 25, 50, ..., 100, and of the last three 80 and 90 besides.
        ({"every_steps": 5, "keep_last": 2, "keep_every": 25}, 100, 6),
        # Every 50th, and of the last three 10^15 - 10 and 10^15 - 20 besides.
        ({"every_steps": 10, "keep_last": 2, "keep_every": 25}, 10**15, 2 * 10**13 + 2),
    ],
)
def test_how_many_are_there_at_once(fields, num_steps, count):
    settings = make_config().checkpoint.model_copy(update=fields)
    assert most_at_once(settings, num_steps) == count
