"""Which settings, counters and times a checkpoint's writer and finder use; without models.

What a checkpoint holds is in tests/run/checkpoint/test_load.py, what becomes of damage and full
disks in tests/run/checkpoint/test_files.py and tests/run/checkpoint/test_writer.py.
"""

import contextlib
import json
import re
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import yaml

from tests.run.checkpoint.test_writer import limited, meet_without_files, settings
from tests.sealed import seal
from tests.workers import free_port

SLOW = 0.3
"""Seconds."""


def kept(root, keep_last, keep_every):
    """Make checkpoints 1 to 7; those that are left."""
    from vapo_megatron.run.checkpoint.writer import CheckpointWriter

    with CheckpointWriter(root, settings(keep_last=keep_last, keep_every=keep_every)) as writer:
        for step in range(1, 8):
            writer.save(step, {}, {})
    return sorted(int(path.name[5:]) for path in root.glob("step_*"))


def test_the_last_ones_and_one_of_so_many_are_kept(workers, tmp_path):
    assert workers.run(1, kept, tmp_path / "1", 2, 0) == [[6, 7]]
    assert workers.run(1, kept, tmp_path / "2", 1, 3) == [[3, 6, 7]]


def told_of_the_second(root, port):
    """What is said when a small checkpoint after a large one cannot be written."""
    from vapo_megatron.errors import CheckpointError
    from vapo_megatron.run.checkpoint.writer import CheckpointWriter

    meet_without_files(port)
    with CheckpointWriter(root, settings()) as writer:
        writer.save(1, {}, {"much": "x" * 600_000})
        writer.wait()
        with limited(10), pytest.raises(CheckpointError) as error:
            writer.save(2, {}, {})
            writer.wait()
    return str(error.value)


def test_the_bytes_that_are_told_are_those_of_one_checkpoint(workers, tmp_path):
    (words,) = workers.run(1, told_of_the_second, tmp_path, free_port())
    (size,) = re.findall(r"it takes (\S+) GB", words)
    assert 0 < float(size) < 1e-6


def timed(root):
    """(seconds that the writer knows, seconds around it) of a slow copy, a slow disk, and both."""
    from vapo_megatron.run.checkpoint.writer import CheckpointWriter

    placed = SimpleNamespace(held=lambda part: contextlib.nullcontext())
    model = SimpleNamespace(num_updates=0, placed=placed)
    found = []
    for copy_seconds, disk_seconds in ((SLOW, 0), (0, SLOW), (SLOW, SLOW)):

        def files_of(writer, role, model, copy=copy_seconds, disk=disk_seconds):
            time.sleep(copy)
            writer._thread.submit(time.sleep, disk)
            return {}

        with (
            mock.patch.object(CheckpointWriter, "_files_of", files_of),
            CheckpointWriter(root, settings()) as writer,
        ):
            assert writer.seconds is None
            begun = time.monotonic()
            writer.save(1, {"actor": model}, {})
            writer.wait()
            found.append((writer.seconds, time.monotonic() - begun))
    return found


def test_the_seconds_are_from_the_copy_to_the_disk(workers, tmp_path):
    """An early signal leaves as many for a checkpoint."""
    (found,) = workers.run(1, timed, tmp_path)
    for (seconds, around), least in zip(found, (SLOW, SLOW, 2 * SLOW), strict=True):
        assert least < seconds < around


def test_a_critic_comes_with_its_own_updates(tmp_path):
    from vapo_megatron.run.checkpoint.load import find_critic

    for step, updates in {1: {"actor": 1, "critic": 8}, 2: {"actor": 3, "critic": 16}}.items():
        directory = tmp_path / f"checkpoints/step_{step:06d}"
        (directory / "critic").mkdir(parents=True)
        (directory / "state.json").write_text(json.dumps({"step": step, "num_updates": updates}))
        seal(directory)
    assert find_critic(tmp_path) == (directory / "critic", 16)
    first = tmp_path / "checkpoints/step_000001"
    assert find_critic(first) == (first / "critic", 8)


def config_of(run_dir, **sections):
    from vapo_megatron.config import VapoConfig

    return VapoConfig.model_validate({**sections, "logging": {"run_dir": str(run_dir)}})


def test_what_has_changed_since_a_checkpoint_is_named(tmp_path):
    from vapo_megatron.run.checkpoint.load import changed_settings

    one = {"path": "one.jsonl", "weight": 1.0}
    old = config_of(
        tmp_path, algorithm={"group_size": 8}, data={"sources": {"one": one, "gone": one}}
    )
    new = config_of(
        tmp_path,
        seed=7,
        model={"hf_path": "other"},
        algorithm={"group_size": 16, "policy_steps": 9},
        optimizer={"actor_learning_rate": 1e-5},
        data={"sources": {"one": {**one, "weight": 2.0}}},
    )
    expected = {
        "seed: 0 -> 7",
        "model.hf_path: null -> other",
        "algorithm.group_size: 8 -> 16",
        f"algorithm.policy_steps: {old.algorithm.policy_steps} -> 9",
        "optimizer.actor_learning_rate: 1e-06 -> 1e-05",
        "data.sources.one.weight: 1.0 -> 2.0",
    }
    state = json.loads(json.dumps({"config": old.model_dump(mode="json")}))
    found = changed_settings(state, new)
    (gone,) = (line for line in found if "gone" in line)
    assert gone.startswith('data.sources.gone: {"') and gone.endswith("} -> unset")
    assert set(found) - {gone} == expected
    assert changed_settings(state, old) == []
    # An older version's checkpoint has no configuration, and knew fewer fields.
    assert changed_settings({}, new) == []
    del state["config"]["optimizer"]["actor_learning_rate"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(state["config"], sort_keys=False))
    expected.remove("optimizer.actor_learning_rate: 1e-06 -> 1e-05")
    assert set(changed_settings({}, new)) == expected | {gone}
    (tmp_path / "config.yaml").write_text("{")
    assert changed_settings({}, new) == []
