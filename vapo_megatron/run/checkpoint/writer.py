"""Writes a run's checkpoints during the run.

`save` takes a snapshot of what this rank writes, and a thread writes it. As soon as all ranks have
written theirs, which they report through the store, the main rank's thread gives the checkpoint its
final name; until then nothing loads it. A `poll` after a later step, or `wait`, raises what went
wrong on every rank. The threads make no collective and start no process.
"""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from vapo_megatron.config import CheckpointConfig
from vapo_megatron.data.disk_errors import describe_write_error
from vapo_megatron.data.storage import Abandoned, HashedFile, sha256_of
from vapo_megatron.errors import CheckpointError
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.checkpoint_metadata import METADATA_FILE
from vapo_megatron.parallel.gradient_buffers import wait_for_parameters
from vapo_megatron.parallel.reduce import any_rank
from vapo_megatron.parallel.sharded_state import take_snapshot
from vapo_megatron.parallel.store import Mailbox
from vapo_megatron.roles.placed import PlacedModel
from vapo_megatron.roles.trained import TrainedModel
from vapo_megatron.run.checkpoint import files as checkpoint_files
from vapo_megatron.weights.convert.sharded_files import format_files, serialized, write_chunks

Content: TypeAlias = bytes | list[tuple[MetadataIndex, Tensor]]
"""Of a file: its bytes, or chunks of tensors."""


class Written(NamedTuple):
    """A file that is on disk."""

    sha256: str
    results: list[WriteResult]
    """Where each chunk is in it."""


_Report: TypeAlias = tuple[OSError | None, int, dict[str, Written]]
"""Of a rank: what went wrong, how many bytes it had to write, and its files."""


class CheckpointWriter:
    """One checkpoint at a time; every rank calls the same methods in the same order."""

    def __init__(self, root: Path, settings: CheckpointConfig) -> None:
        """Nothing is written yet.

        Args:
            root: directory of the run's checkpoints.
            settings: keep_last, keep_every and asynchronous are used.
        """
        self._root, self._settings, self._mailbox = root, settings, Mailbox()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._stop = threading.Event()
        self._step: int | None = None
        self._futures: list[concurrent.futures.Future[Any]] = []
        self._outcome: concurrent.futures.Future[str]
        self._deletion: concurrent.futures.Future[None] | None = None
        self._metadata: dict[str, Metadata] = {}
        self._num_bytes = 0
        self._more: Mapping[str, str] = {}
        self.seconds: float | None = None
        """Of the latest checkpoint, from the start of save until all is on disk."""

    def save(
        self,
        step: int,
        models: Mapping[str, TrainedModel],
        state: Mapping[str, Any],
        write_more: Callable[[Path], Mapping[str, str]] = lambda directory: {},
    ) -> None:
        """Begin checkpoint `step` after finishing the one before it; collective.

        Args:
            step: number of finished steps.
            models: by role; they may change as soon as this returns.
            state: what else a resume needs; JSON values, the same on every rank.
            write_more: lets other processes write files into the checkpoint's directory; returns
                their names and SHA-256, the same on every rank.

        Raises:
            CheckpointError: the one before, or without `asynchronous` this one, cannot be written.
        """
        self.wait()
        rank, name = dist.get_rank(), [uuid.uuid4().hex]
        if rank == 0 and not self._futures:  # The thread may still delete what is old.
            checkpoint_files.delete_unfinished(self._root)
        dist.broadcast_object_list(name, device=backend.device())  # The others wait for that.
        self._step, self._num_bytes = step, 0
        start = time.monotonic()
        self._more = write_more(checkpoint_files.partial_directory(self._root, step))
        updates = {role: model.num_updates for role, model in models.items()}
        content = {"step": step, "num_updates": updates, "run": state}
        if rank == 0:
            self._write({checkpoint_files.STATE: json.dumps(content, indent=1).encode()})
        for role, model in models.items():
            with model.placed.held("state"):
                self._write(self._files_of(role, model.placed))
                if not self._settings.asynchronous:
                    concurrent.futures.wait(self._futures)
        self._outcome = self._thread.submit(self._finish, step, name[0], start)
        if rank == 0:
            self._deletion = self._thread.submit(self._delete_old, step)
        if not self._settings.asynchronous:
            self.wait()

    def poll(self) -> None:
        """Raise what went wrong if the checkpoint is finished; collective.

        Raises:
            CheckpointError: it cannot be written; the same on every rank.
        """
        if self._step is not None and not any_rank(not self._outcome.done()):
            self._complete()

    def wait(self) -> None:
        """Finish the checkpoint; collective. Raises CheckpointError: see poll."""
        if self._step is not None:
            self._complete()

    def _files_of(self, role: str, model: PlacedModel) -> dict[str, Content]:
        """Return what this rank writes of a model, by file name in the checkpoint."""
        wait_for_parameters(model.chunks)
        copy, rank = self._settings.asynchronous, dist.get_rank()
        snapshot = take_snapshot(model.model, model.optimizer, copy=copy)
        files: dict[str, Content] = {}
        if snapshot.metadata is not None:
            self._metadata[role] = snapshot.metadata
            files |= format_files(serialized(snapshot.common))
        if snapshot.items:
            files[f"__{rank}_0.distcp"] = snapshot.items
        return {f"{role}/{name}": content for name, content in files.items()}

    def _write(self, files: dict[str, Content]) -> None:
        assert self._step is not None
        self._num_bytes += sum(map(_size, files.values()))
        directory = checkpoint_files.partial_directory(self._root, self._step)
        self._futures.append(self._thread.submit(_write_files, directory, files, self._stop))

    def _complete(self) -> None:
        """Raise the main rank's outcome on every rank. Collective."""
        outcome = [self._outcome.result()]  # Raises what is a bug, not a disk.
        self._step, self._metadata, self._more = None, {}, {}
        self._futures = [] if self._deletion is None else [self._deletion]
        dist.broadcast_object_list(outcome, device=backend.device())
        if outcome[0]:
            raise CheckpointError(outcome[0])

    def _finish(self, step: int, name: str, start: float) -> str:
        """Report what this rank has written; the main rank publishes what all have. In the thread.

        Returns:
            Why there is no checkpoint, on the main rank; empty: there is one.
        """
        error: OSError | None = None
        written: dict[str, Written] = {}
        for future in self._futures:
            try:
                written |= future.result() or {}
            except OSError as found:
                error = error or found
        self._mailbox.send(name, (error, self._num_bytes, {} if error else written))
        problem = ""
        if dist.get_rank() == 0:
            reports = self._mailbox.receive(name, self._stop)
            if reports is None:
                raise Abandoned
            problem = self._publish(step, reports)
        self.seconds = time.monotonic() - start
        return problem

    def _publish(self, step: int, reports: Iterable[_Report]) -> str:
        """Return why there is no checkpoint; empty: there is one."""
        errors, sizes, written = zip(*reports, strict=True)
        error = next((e for e in errors if e is not None), None)
        try:
            if error is None:
                files = {name: file for of_rank in written for name, file in of_rank.items()}
                sums = {name: file.sha256 for name, file in files.items()}
                sums |= self._write_metadata(step, files) | dict(self._more)
                checkpoint_files.publish(self._root, step, sums)
                return ""
        except OSError as own:
            error = own
        return _describe(self._root, step, error, sum(sizes))

    def _delete_old(self, step: int) -> None:
        """Delete what `step` replaces; an error is raised with the next checkpoint's."""
        if self._outcome.exception() is None and not self._outcome.result():
            keep = self._settings
            checkpoint_files.delete_unkept(
                self._root, step, keep_last=keep.keep_last, keep_every=keep.keep_every
            )

    def _write_metadata(self, step: int, files: Mapping[str, Written]) -> dict[str, str]:
        """Write each role's metadata, which locates its chunks; return the checksums."""
        partial = checkpoint_files.partial_directory(self._root, step)
        sums = {}
        for role, metadata in self._metadata.items():
            results = [f.results for name, f in files.items() if name.startswith(f"{role}/")]
            FileSystemWriter(partial / role).finish(metadata, results)
            name = f"{role}/{METADATA_FILE}"
            sums[name] = sha256_of(partial / name)
        return sums

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish; after an error, when other ranks may hang, abandon what is unfinished."""
        try:
            if kind is None:
                self.wait()
        finally:
            self._stop.set()
            self._thread.shutdown()


def _write_files(
    directory: Path, files: dict[str, Content], stop: threading.Event
) -> dict[str, Written]:
    written = {}
    for name, content in files.items():
        results: list[WriteResult] = []
        with HashedFile(directory / name, stop) as out:
            if isinstance(content, list):
                results = write_chunks(out, Path(name).name, content)
            else:
                out.write(content)
        written[name] = Written(out.sha256, results)
    return written


def _size(content: Content) -> int:
    if isinstance(content, list):
        return sum(tensor.nbytes for _, tensor in content)
    return len(content)


def _describe(root: Path, step: int, error: OSError, num_bytes: int) -> str:
    """Return what went wrong in one line; delete the partial checkpoint to free space."""
    shutil.rmtree(checkpoint_files.partial_directory(root, step), ignore_errors=True)
    final = root / checkpoint_files.directory_name(step)
    remedy = "make room there, or lower checkpoint.keep_last or keep_every"
    why = describe_write_error(final, error, num_bytes, remedy=remedy)
    left = next((path.name for path in checkpoint_files.candidates(root)), "the beginning")
    return f"{why}, and restart the run: it resumes from {left}"
