"""Runs jobs concurrently; skips finished ones, and continues after a failure."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from runner.forked import Fork, can_fork, import_libraries
from runner.jobs import Job, read_state, write_state
from vapo_megatron.errors import DataError
from vapo_megatron.run.directory import read_rows
from vapo_megatron.run.progress import format_seconds

POLL_SECONDS = 0.2


@contextlib.contextmanager
def locked(root: Path) -> Iterator[int]:
    """Lock a directory against other invocations; yields the lock's file descriptor.

    Job processes inherit it, so that the lock holds as long as any of them outlives a killed
    invocation.

    Raises:
        DataError: another invocation holds the lock.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{root} is in use by another invocation or processes left by one; wait for them, "
                "or give another --out"
            ) from None
        yield file.fileno()


class Running:
    """A job's process, in its own session."""

    process: subprocess.Popen[bytes] | Fork

    def __init__(self, job: Job, lock: int, environment: Mapping[str, str], cwd: Path) -> None:
        """Start the process; it resumes from an earlier one's output."""
        before = read_state(job)
        self.job = job
        self.seconds_before = before["seconds"] if before else 0.0
        self.first_share = share_done(job)
        self.started = time.monotonic()
        write_state(job, finished=False, seconds=self.seconds_before)
        job.out.parent.mkdir(parents=True, exist_ok=True)
        if is_forked(job):  # Has the lock as well.
            self.process = Fork(job.command, job.log, cwd)
            return
        with job.log.open("ab") as log:
            self.process = subprocess.Popen(
                job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=cwd,
                env=dict(environment), start_new_session=True, pass_fds=(lock,),
            )  # fmt: skip

    @property
    def elapsed(self) -> float:
        """Seconds since this process started."""
        return time.monotonic() - self.started

    def record(self, *, finished: bool) -> float:
        """Write the job's state; return its total seconds over all processes."""
        seconds = self.seconds_before + self.elapsed
        write_state(self.job, finished=finished, seconds=seconds)
        return seconds

    def kill(self) -> None:
        """Kill the process and its children; a run can resume from its latest checkpoint."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # One that has only just started may have no group of its own yet.
        self.process.kill()
        self.process.wait()


def is_forked(job: Job) -> bool:
    """Whether a job is a run of one process, which a fork starts faster."""
    return job.num_steps > 0 and can_fork(job.command)


def run_jobs(
    jobs: Sequence[Job],
    *,
    slots: int,
    lock: int,
    environment: Mapping[str, str],
    cwd: Path,
    say: Callable[[str], None] = print,
    finished: Callable[[Job], str] = lambda job: "",
    status_seconds: float = 60.0,
) -> dict[str, str]:
    """Run all unfinished jobs, each once its dependencies are finished.

    Args:
        jobs: by priority, dependencies first.
        slots: number of concurrent jobs.
        lock: from `locked`.
        environment: of the processes.
        cwd: working directory of the processes.
        say: prints a line.
        finished: called after each job that succeeded; its result is printed.
        status_seconds: interval of status lines.

    Returns:
        name -> reason, of jobs that failed or could not be run.
    """
    states = {job.name: read_state(job) for job in jobs}
    took = {name: s["seconds"] for name, s in states.items() if s and s["finished"]}
    if took:
        say(f"{len(took)} of {len(jobs)} already finished")
    waiting = [job for job in jobs if job.name not in took]
    running: list[Running] = []
    failures: dict[str, str] = {}
    told = time.monotonic()
    has_libraries = False
    try:
        while waiting or running:
            for job in [job for job in waiting if failed_need(job, failures)]:
                failures[job.name] = f"not run, because {failed_need(job, failures)} failed"
                waiting.remove(job)
            for job in [job for job in waiting if took.keys() >= set(job.needs)]:
                if len(running) < slots:
                    if is_forked(job) and not has_libraries:
                        say("importing torch, megatron-core and vLLM, once for all runs")
                        import_libraries(environment)
                        has_libraries = True
                    with _signals_deferred():
                        running.append(Running(job, lock, environment, cwd))
                    waiting.remove(job)
            time.sleep(POLL_SECONDS)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                one.kill()
                name, code = one.job.name, one.process.returncode
                whole = code == 0 and steps_done(one.job) == one.job.num_steps
                seconds = one.record(finished=whole)
                if not whole:
                    failures[name] = f"exit code {code}{_progress(one.job)}, see {one.job.log}"
                    say(f"{name}: failed, {failures[name]}")
                else:
                    took[name] = seconds
                    line = f"{name}: {finished(one.job)}".rstrip(": ")
                    left = format_seconds(seconds_left(jobs, took, running, failures, slots))
                    done = f"{len(took)} of {len(jobs)} done, {left} left"
                    say(f"{line} after {format_seconds(seconds)}; {done}")
            if time.monotonic() - told > status_seconds and running:
                told = time.monotonic()
                left = format_seconds(seconds_left(jobs, took, running, failures, slots))
                work = ", ".join(one.job.name + _progress(one.job) for one in running)
                say(f"  running: {work}; {left} left")
    finally:
        for one in running:
            one.kill()
            one.record(finished=False)
    return failures


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer signals until after the body, so that a process being started is not left behind.

    Ignored signals stay ignored, because the process inherits that.
    """
    came: list[int] = []
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in came[:1]:
        signal.raise_signal(number)


def failed_need(job: Job, failures: Mapping[str, str]) -> str | None:
    """Return the job's first failed dependency."""
    return next((need for need in job.needs if need in failures), None)


def steps_done(job: Job) -> int:
    """Return the last step of the job's metrics."""
    file = job.out / "metrics.jsonl"
    rows = read_rows(file) if job.num_steps and file.exists() else []
    return rows[-1]["step"] if rows else 0


def share_done(job: Job) -> float:
    """Return the fraction of a run's steps that is done; 0 for jobs without steps."""
    return min(1.0, steps_done(job) / job.num_steps) if job.num_steps else 0.0


def _progress(job: Job) -> str:
    return f" at step {steps_done(job)}/{job.num_steps}" if job.num_steps else ""


def seconds_left(
    jobs: Sequence[Job],
    took: Mapping[str, float],
    running: Sequence[Running],
    failures: Mapping[str, str],
    slots: int,
) -> float:
    """Estimate the remaining seconds from the jobs done so far.

        sum over unfinished jobs of estimate * remaining share * (measured / estimated) / slots

    measured and estimated are seconds of finished jobs and of the steps of running ones.
    """
    shares = {one.job.name: share_done(one.job) for one in running}
    measured, estimated = sum(took.values()), 0.0
    rest = 0.0
    for one in running:
        gained = shares[one.job.name] - one.first_share
        if gained > 0:
            measured += one.elapsed
            estimated += one.job.estimate_seconds * gained
    for job in jobs:
        if job.name in took:
            estimated += job.estimate_seconds
        elif job.name not in failures:
            rest += job.estimate_seconds * (1 - shares.get(job.name, 0.0))
    return rest * (measured / estimated if estimated else 1.0) / slots
