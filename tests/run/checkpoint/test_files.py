"""Which checkpoint a run goes on from, and which it keeps; on directories, without a model.

Not exercised: a machine that loses power (what fsync is for), and file systems that show other
ranks a directory late.
"""

import errno
import json
import os
import shutil
import threading

import pytest

from tests.sealed import seal
from vapo_megatron.data.storage import Abandoned, HashedFile
from vapo_megatron.errors import CheckpointError
from vapo_megatron.run.checkpoint import files as checkpoint_files
from vapo_megatron.run.checkpoint.files import newest_complete


def make(root, *steps, latest=None):
    """Whole checkpoints of a role."""
    for step in steps:
        directory = root / f"step_{step:06d}"
        (directory / "actor").mkdir(parents=True)
        (directory / "state.json").write_text(json.dumps({"step": step}))
        (directory / "actor/__0_0.distcp").write_bytes(bytes([step % 256]) * 5000)
        seal(directory)
    (root / "latest").write_text(f"step_{latest or steps[-1]:06d}")
    return root


def change(path, position, text):
    content = bytearray(path.read_bytes())
    content[position : position + len(text)] = text
    path.write_bytes(content)


DAMAGE = {
    "a bit": (
        lambda d: change(d / "actor/__0_0.distcp", 4999, b"\x15"),
        "actor/__0_0.distcp is damaged: its SHA-256 is not the one in checksums.json",
    ),
    "an end": (
        lambda d: (d / "actor/__0_0.distcp").write_bytes(b"\x14" * 4999),
        "actor/__0_0.distcp is damaged",
    ),
    "a file": (lambda d: (d / "actor/__0_0.distcp").unlink(), "No such file"),
    "the state": (lambda d: change(d / "state.json", 9, b"1"), "state.json is damaged"),
    "the mark": (lambda d: (d / "checksums.json").unlink(), "no checksums.json"),
    "half of the mark": (
        lambda d: (d / "checksums.json").write_bytes((d / "checksums.json").read_bytes()[:-20]),
        "checksums.json is damaged",
    ),
    "an empty mark": (lambda d: (d / "checksums.json").write_text("{}"), "checksums.json is dam"),
    "a mark of another directory": (
        lambda d: (d / "checksums.json").write_text('{"state.json": "", "../x": ""}'),
        "checksums.json is damaged: it does not list a checkpoint's files",
    ),
    "all": (shutil.rmtree, "no such directory"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_named_and_the_one_before_is_used(tmp_path, capsys, kind):
    root = make(tmp_path, 10, 20)
    assert newest_complete(root).name == "step_000020" and not capsys.readouterr().err
    damage, message = DAMAGE[kind]
    damage(root / "step_000020")
    assert newest_complete(root) == root / "step_000010"
    told = capsys.readouterr().err
    assert f"{root}/step_000020 ({message}" in told or f": {message}" in told
    assert "step_000010 is used" in told and told.count("\n") == 1


def listing(root):
    return {p.relative_to(root): p.is_file() and p.read_bytes() for p in root.rglob("*")}


def test_without_a_whole_one_it_is_an_error_and_nothing_is_touched(tmp_path):
    root = make(tmp_path, 10, 20)
    (root / "step_000010/checksums.json").unlink()
    change(root / "step_000020/state.json", 0, b"[")
    (root / "step_000030.partial").mkdir()
    before = listing(root)
    with pytest.raises(CheckpointError) as error:
        newest_complete(root)
    told = str(error.value)
    assert "step_000020 (state.json is damaged" in told and "step_000010 (no checksums" in told
    assert "checkpoint.resume=false" in told and "\n" not in told
    assert listing(root) == before


def test_a_run_that_died_in_its_first_checkpoint_has_none(tmp_path):
    assert newest_complete(tmp_path / "checkpoints") is None
    shutil.move(make(tmp_path / "at", 10) / "step_000010", tmp_path / "step_000010.partial")
    assert newest_complete(tmp_path) is None


def test_latest_is_the_newest_that_counts(tmp_path):
    """Whoever writes an older name into it goes back; a run that died before it is not set back."""
    root = make(tmp_path, 10, 20, 1_000_000, latest=20)
    assert newest_complete(root).name == "step_000020"
    (root / "latest").unlink()
    assert newest_complete(root).name == "step_1000000"
    (root / "latest").write_text("")
    assert newest_complete(root).name == "step_1000000"
    (root / "latest").write_text("step_000015\n")
    assert newest_complete(root).name == "step_000010"


def test_a_run_that_begins_anew_and_its_restarts_leave_what_is_there(tmp_path):
    checkpoint_files.start_from_scratch(tmp_path)
    assert not list(tmp_path.iterdir()), "there is nothing to give up"
    root = make(tmp_path, 10, 20)
    checkpoint_files.start_from_scratch(root)
    assert newest_complete(root) is None and sorted(checkpoint_files.step_directories(root)) == [
        10,
        20,
    ]
    publish(root, 5)
    assert newest_complete(root).name == "step_000005"


@pytest.mark.parametrize(
    "name,value,goes_on",
    [
        ("TORCHELASTIC_RESTART_COUNT", "1", True),
        ("SLURM_RESTART_COUNT", "2", True),
        ("TORCHELASTIC_RESTART_COUNT", "0", False),
        ("SLURM_RESTART_COUNT", "", False),
    ],
)
def test_a_restart_goes_on_from_checkpoints_whatever_it_was_told(monkeypatch, name, value, goes_on):
    for other in checkpoint_files.RESTART_COUNTS:
        monkeypatch.delenv(other, raising=False)
    assert checkpoint_files.resumes(True) and not checkpoint_files.resumes(False)
    monkeypatch.setenv(name, value)
    assert checkpoint_files.resumes(True) and checkpoint_files.resumes(False) == goes_on


def test_one_role_alone_is_read_where_it_alone_is_wanted(tmp_path):
    root = make(tmp_path, 10)
    (root / "step_000010/actor/__0_0.distcp").unlink()
    assert newest_complete(root, "critic").name == "step_000010"
    with pytest.raises(CheckpointError, match="all checkpoints are damaged"):
        newest_complete(root, "actor")


@pytest.mark.parametrize(
    "step,keep_last,keep_every,left",
    [
        (50, 2, 0, [40, 50]),
        (50, 1, 20, [20, 40, 50]),
        (50, 9, 0, [10, 20, 30, 40, 50]),
        (30, 2, 0, [20, 30]),  # set back to 20: what came after 30 is being made again
    ],
)
def test_what_is_kept(tmp_path, step, keep_last, keep_every, left):
    root = make(tmp_path, 10, 20, 30, 40, 50)
    checkpoint_files.delete_unkept(root, step, keep_last=keep_last, keep_every=keep_every)
    assert sorted(p.name for p in root.glob("step_*")) == [f"step_{s:06d}" for s in left]


def publish(root, step, content=b"x"):
    partial = checkpoint_files.partial_directory(root, step)
    with HashedFile(partial / "state.json") as out:
        out.write(content)
    sums = {"state.json": out.sha256}
    checkpoint_files.publish(root, step, sums)


def test_publishing_replaces_what_was_damaged(tmp_path):
    root = make(tmp_path, 10, 20)
    change(root / "step_000020/state.json", 0, b"[")
    publish(root, 20, b"again")
    assert (root / "latest").read_text() == "step_000020" == newest_complete(root).name
    assert (root / "step_000020/state.json").read_text() == "again"
    checkpoint_files.delete_unkept(root, 20, keep_last=2, keep_every=0)
    assert sorted(p.name for p in root.iterdir()) == ["latest", "step_000010", "step_000020"]


def test_what_cannot_be_deleted_is_told_and_tried_again(tmp_path, monkeypatch, capsys):
    """By a run that goes on: a damaged one that it replaces, and two that it keeps no more."""
    root, gone = make(tmp_path, 10, 20, 30), shutil.rmtree
    change(root / "step_000030/state.json", 0, b"[")

    def refuse(path, **_):
        if path.name == "step_000010.old":  # somebody deletes it, too
            gone(path)
        os.scandir(path).close()
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        for content in (b"again", b"once more"):
            publish(root, 30, content)
            checkpoint_files.delete_unkept(root, 30, keep_last=1, keep_every=0)
            assert newest_complete(root).name == "step_000030"
            assert (root / "step_000030/state.json").read_bytes() == content
    told = capsys.readouterr().err.splitlines()
    left = ["step_000020.old", "step_000030.old", "step_000030.old.old"]
    assert {p.name for p in root.iterdir()} == {"latest", "step_000030", *left}
    warning = "warning: {}/{} cannot be deleted: Permission denied; the next checkpoint tries"
    for line in told:
        assert any(line.startswith(warning.format(root, name)) for name in left), line
    assert len(told) == 2 + 3
    checkpoint_files.delete_unkept(root, 30, keep_last=1, keep_every=0)
    assert sorted(p.name for p in root.iterdir()) == ["latest", "step_000030"]


class Killed(BaseException):
    """As if the process were gone at once: nothing is caught, nothing is cleaned up."""


@pytest.mark.parametrize("at", range(1, 14))
def test_killed_anywhere_while_publishing_a_whole_one_is_left(tmp_path, monkeypatch, at):
    """Before each of its changes to the disk in turn."""
    root = make(tmp_path, 10, 20)
    change(root / "step_000020/state.json", 0, b"[")
    count = [0]

    def counted(function):
        def call(*arguments, **options):
            count[0] += 1
            if count[0] == at:
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for owner, name in [
            (checkpoint_files.os, "fsync"),
            (checkpoint_files.shutil, "rmtree"),
            (checkpoint_files.os, "replace"),
            (checkpoint_files.Path, "rename"),
        ]:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            publish(root, 20, b"again")
            checkpoint_files.delete_unkept(root, 20, keep_last=1, keep_every=0)
            assert count[0] < at == 13, "more changes than this test makes fail"
        except Killed:
            pass
    left = newest_complete(root)
    assert (left.name, (left / "state.json").read_text()) in [
        ("step_000010", '{"step": 10}'),
        ("step_000020", "again"),
    ]
    checkpoint_files.delete_unfinished(root)
    publish(root, 30)
    checkpoint_files.delete_unkept(root, 30, keep_last=1, keep_every=0)
    assert sorted(p.name for p in root.iterdir()) == ["latest", "step_000030"]


def test_writing_stops_when_it_is_told_to(tmp_path):
    stop = threading.Event()
    with pytest.raises(Abandoned):
        with HashedFile(tmp_path / "d/file", stop) as out:
            out.write(b"a" * 70_000)
            out.check()
            stop.set()
            out.check()
    assert (tmp_path / "d/file").read_bytes() == b"a" * 70_000
