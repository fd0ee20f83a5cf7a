"""Checkpoints written while a run goes on: when one counts, full disks, and hostile ones.

The full disk is a small tmpfs, or where mounting is not permitted a limit on the size of files.
Not exercised: several machines, of which one writes to a disk of its own; and a GPU's copies.
"""

import contextlib
import errno
import functools
import json
import os
import pickle
import re
import resource
import subprocess
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from tests.sealed import seal
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.config import CheckpointConfig, VapoConfig
from vapo_megatron.errors import CheckpointError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel import backend, groups
from vapo_megatron.parallel.sharded_state import load_model_weights
from vapo_megatron.roles.critic import Critic
from vapo_megatron.run.checkpoint import files as checkpoint_files
from vapo_megatron.run.checkpoint.files import RESTART_COUNTS, find_problems, newest_complete
from vapo_megatron.run.checkpoint.load import find_start, load_run
from vapo_megatron.run.checkpoint.writer import CheckpointWriter, _describe

SIZES = dict(num_layers=1, hidden=32, heads=2, kv_heads=2, vocab=60)


def critic_of_two(hf):
    """One that both ranks write their part of."""
    parallel = {"world_size": 2, "tensor_model_parallel_size": 2}
    config = VapoConfig.model_validate({"model": {"hf_path": str(hf)}, "parallel": parallel})
    place = groups.initialize(config.parallel)
    return Critic(read_model_shape(hf), config, place, str(hf)).trained


def latest_of(root):
    return (root / "latest").read_text() if (root / "latest").exists() else None


def held_back(root):
    """Checkpoints of two ranks, of which the second rank's thread starts late; nobody waits then.

    What is `latest` while it is held back, and soon after.
    """
    seen, late = [], threading.Event()
    with CheckpointWriter(root, CheckpointConfig(keep_last=2)) as writer:
        for step in (1, 2):
            late.clear()
            if dist.get_rank() == 1:
                writer._thread.submit(late.wait, 60)
            writer.save(step, {}, {"step": step})
            writer.poll()
            dist.barrier()
            seen.append(latest_of(root))
            dist.barrier()
            late.set()
            deadline = time.monotonic() + 30
            while latest_of(root) != f"step_{step:06d}" and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(latest_of(root))
            dist.barrier()
        writer.save(3, {}, {"step": 3})
    dist.barrier()
    seen.append(latest_of(root))
    # An error ends the run while the second rank writes.
    late.clear()
    with contextlib.suppress(ZeroDivisionError):
        with CheckpointWriter(root, CheckpointConfig(keep_last=1)) as writer:
            if dist.get_rank() == 1:
                writer._thread.submit(late.wait, 1)
            writer.save(4, {}, {})
            raise ZeroDivisionError
    dist.barrier()
    seen.append(latest_of(root))
    with CheckpointWriter(root, CheckpointConfig(asynchronous=False)) as writer:
        writer.save(5, {}, {})
        dist.barrier()
        seen.append(latest_of(root))
    return seen


def test_a_checkpoint_counts_as_soon_as_all_ranks_have_written_theirs(workers, tmp_path):
    for seen in workers.run(2, held_back, tmp_path):
        assert seen == [None, *(f"step_00000{n}" for n in (1, 1, 2, 3, 3, 5))]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000003", "step_000005"]
    directory = tmp_path / "step_000003"
    assert json.loads((directory / "state.json").read_text())["run"] == {"step": 3}
    assert sorted(p.name for p in directory.iterdir()) == ["checksums.json", "state.json"]


def starts(run_dir, restarted, *, resume=False, step=None):
    """What a run goes on from; saves a step then. One rank has been told that it is a restart."""
    tree = {"logging": {"run_dir": str(run_dir)}, "checkpoint": {"resume": resume}}
    is_told = restarted and dist.get_rank() == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RESTART_COUNTS[0], "1" if is_told else "0")
        start = find_start(VapoConfig.model_validate(tree))
    dist.barrier()
    if step is not None:
        with CheckpointWriter(run_dir / "checkpoints", CheckpointConfig(keep_last=1)) as writer:
            writer.save(step, {}, {})
    return start.own and start.own.name


def test_a_restart_goes_on_from_what_the_run_has_saved_alone(workers, tmp_path):
    def found(*how, **more):
        first, second = workers.run(2, functools.partial(starts, tmp_path, *how, **more))
        assert first == second
        return first

    assert found(False, step=3) is None
    assert found(True) == "step_000003"
    assert found(False) is None, "checkpoint.resume=false: an earlier run's"
    assert found(True) is None and found(False, resume=True) is None
    assert found(True, step=1) is None
    assert found(True) == found(False, resume=True) == "step_000001"


def damaged_in_turn(root, hf):
    """What this rank finds, and what it would go on from, when a file is damaged; of each file."""
    critic = critic_of_two(hf)
    with CheckpointWriter(root, CheckpointConfig(keep_last=2)) as writer:
        writer.save(1, {"critic": critic}, {})
        writer.save(2, {"critic": critic}, {})
    found = {}
    for name in ("critic/__0_0.distcp", "critic/__1_0.distcp", "state.json"):
        file = root / "step_000002" / name
        content = file.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(content[:-1])
        dist.barrier()
        found[name] = (find_problems(root / "step_000002", None), newest_complete(root).name)
        dist.barrier()
        file.write_bytes(content)
    return found


def test_damage_that_one_rank_reads_is_known_to_all(workers, tmp_path):
    hf = write_tiny_hf(tmp_path / "hf", ffn=48, **SIZES)
    first, second = workers.run(2, damaged_in_turn, tmp_path / "checkpoints", hf)
    assert first == second
    for name, (problems, used) in first.items():
        (problem,) = problems
        assert problem.startswith(f"{name} is damaged") and used == "step_000001"


def slow_to_delete(root):
    """A checkpoint that is begun while old ones are still being deleted."""
    begun, over = threading.Event(), threading.Event()

    def delete_unkept(root, step, **kept):
        old = root / f"step_{step:06d}.old"
        old.mkdir()
        begun.set()
        assert over.wait(60)
        old.rmdir()

    with (
        pytest.MonkeyPatch.context() as patch,
        CheckpointWriter(root, CheckpointConfig()) as writer,
    ):
        patch.setattr(checkpoint_files, "delete_unkept", delete_unkept)
        writer.save(1, {}, {})
        writer.wait()
        assert begun.wait(60)
        writer.save(2, {}, {})
        over.set()


def test_a_checkpoint_does_not_wait_for_old_ones_to_go(workers, tmp_path):
    workers.run(1, slow_to_delete, tmp_path)
    left = ["latest", "step_000001", "step_000002"]
    assert sorted(p.name for p in tmp_path.iterdir()) == left


@contextlib.contextmanager
def small_disk(directory, num_bytes):
    """Yield whether files are limited instead."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True).returncode:
        yield True
        return
    try:
        yield False
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@contextlib.contextmanager
def limited(num_bytes):
    """Let no file of this process become larger; None: any."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes or before[0], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def meet_without_files():
    """The workers' own group meets in a file, which a limit on files would meet too."""
    dist.destroy_process_group()
    backend.initialize_distributed(60)


def fill(root, hf, limit):
    """A checkpoint that fits, two that do not, what they say, and what is left then."""
    meet_without_files()
    with CheckpointWriter(root, CheckpointConfig()) as writer:
        writer.save(1, {}, {})
    messages, models = [], {"critic": critic_of_two(hf)}
    of_second_rank = 1000 if dist.get_rank() else None
    for roles, state, num_bytes in (
        (models, {}, of_second_rank),
        ({}, {"much": "x" * 600_000}, limit),
    ):
        with limited(num_bytes), pytest.raises(CheckpointError) as error:
            with CheckpointWriter(root, CheckpointConfig()) as writer:
                writer.save(2, roles, state)
        messages.append(str(error.value))
    dist.barrier()
    return messages, newest_complete(root).name, sorted(p.name for p in root.iterdir())


def test_a_full_disk_is_told_in_a_line_and_the_checkpoint_before_it_is_left(workers, tmp_path):
    root, hf = tmp_path / "disk", write_tiny_hf(tmp_path / "hf", ffn=48, **SIZES)
    root.mkdir()
    with small_disk(root, 300 << 10) as is_limited:
        found = workers.run(2, fill, root, hf, 300 << 10 if is_limited else None)
    reason = os.strerror(errno.EFBIG if is_limited else errno.ENOSPC)
    for (of_second_rank, full), newest, left in found:
        assert f"step_000002 cannot be written: {os.strerror(errno.EFBIG)} (it" in of_second_rank
        assert "raise the limit on a file's size" in of_second_rank
        assert f"{root}/step_000002 cannot be written: {reason} (it takes 0.0006 GB" in full
        assert is_limited or "lower checkpoint.keep_last" in full
        assert "resumes from step_000001" in full
        assert "\n" not in full
        assert newest == "step_000001" and left == ["latest", "step_000001"]


def test_a_disk_too_full_for_the_checkpoints_directory_is_told_too(tmp_path):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    words = _describe(tmp_path / "run/checkpoints", 1, error, 10**9)
    assert "run/checkpoints/step_000001 cannot be written: No space left on device (it" in words
    assert "takes 1 GB, " in words and "resumes from the beginning" in words


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def break_metadata(directory, change):
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


NORM = "decoder.final_layernorm.weight"


def evil_object(directory, path, name=NORM):
    """A tensor that is asked for becomes an object, which torch's loader would unpickle."""
    torch.save(Evil(path), directory / "evil")
    place = _StorageInfo("evil", 0, (directory / "evil").stat().st_size)

    def change(metadata):
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = place

    break_metadata(directory, change)


def object_for_common(directory, path):
    """What megatron-core 0.19 looks for where there is no common.pt."""
    (directory / "common.pt").unlink()
    evil_object(directory, path, "common_state/shard_0_1")


def outside(metadata):
    for place in metadata.storage_data.values():
        place.relative_path = "../critic/" + place.relative_path


HOSTILE = {
    "metadata": (
        lambda d, path: (d / ".metadata").write_bytes(pickle.dumps(Evil(path))),
        "it names posix.mkdir",
    ),
    "object": (evil_object, f"is of another model.*{NORM} is missing"),
    "common": (lambda d, path: torch.save(Evil(path), d / "common.pt"), "more than tensors"),
    "no common": (object_for_common, "has no common.pt"),
    "outside": (
        lambda d, path: break_metadata(d, outside),
        "must be in a file of the same directory",
    ),
}


def load_others(hf, root, shape):
    """Save a critic, and try to load what is made of it, also where nobody has looked at it before;
    what loading says of each.
    """

    def build(hf, *, distributed=True):
        parallel = {"world_size": 1, "use_distributed_optimizer": distributed}
        tree = {"model": {"hf_path": str(hf), "dtype": "bfloat16"}, "parallel": parallel}
        config = VapoConfig.model_validate(tree)
        return Critic(read_model_shape(hf), config, place, str(hf)).trained

    def refusal(model):
        before = [p.clone() for p in model.placed.model[0].parameters()]
        with pytest.raises(CheckpointError) as error:
            load_run(newest_complete(root), {"critic": model})
        same = zip(before, model.placed.model[0].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in same), "nothing was loaded"
        return str(error.value)

    place = groups.initialize(VapoConfig.model_validate({"parallel": {"world_size": 1}}).parallel)
    model = build(hf)
    found = {}
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    for step, (kind, (change, _)) in enumerate(HOSTILE.items(), start=1):
        with CheckpointWriter(root, CheckpointConfig()) as writer:
            writer.save(step, {"critic": model}, {})
        change(root / f"step_{step:06d}/critic", root / "executed")
        seal(root / f"step_{step:06d}")
        found[kind] = refusal(model)
        with contextlib.suppress(BaseException):
            load_model_weights(model.placed.model, root / f"step_{step:06d}/critic")
    with CheckpointWriter(root, CheckpointConfig()) as writer:
        writer.save(step + 1, {"critic": model}, {})
    assert load_run(newest_complete(root), {"critic": model}) == (step + 1, {})
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in os.environ
    found["shape"] = refusal(build(shape))
    found["optimizer"] = refusal(build(hf, distributed=False))
    return found


def test_what_cannot_be_loaded_is_refused_and_no_code_runs(workers, tmp_path):
    hf = write_tiny_hf(tmp_path / "hf", ffn=48, **SIZES)
    shape = write_tiny_hf(tmp_path / "shape", ffn=64, **SIZES)
    root = tmp_path / "checkpoints"
    (found,) = workers.run(1, load_others, hf, root, shape)
    expected = {kind: message for kind, (_, message) in HOSTILE.items()}
    expected["shape"] = r"linear_fc1.weight: expected shape \[1, 128, 32\], found \[1, 96, 32\]"
    expected["optimizer"] = "of an optimizer with other settings: optimizer.state.fp32_param"
    for kind, message in expected.items():
        assert re.search(message, found[kind]), (kind, found[kind])
        assert "\n" not in found[kind]
    assert not (root / "executed").exists()
