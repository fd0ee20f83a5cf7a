"""Processes of one job of which one meets a fault, started as torchrun starts them.

`run_phases` has the job's watchdog and collectives, and no models; `train` is a real run of two
tensor-parallel processes from a dump.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.dumped import config
from vapo_megatron.config import VapoConfig
from vapo_megatron.errors import Stopped, UserError, tell
from vapo_megatron.run.directory import PROBLEMS_FILE
from vapo_megatron.run.metrics import MetricsWriter

if TYPE_CHECKING:
    from vapo_megatron.parallel.health.heartbeat import Heartbeat
    from vapo_megatron.parallel.health.watchdog import Watchdog


def _raise(error: Exception) -> None:
    raise error


def _meet_a_full_disk() -> None:
    with tempfile.TemporaryDirectory() as place, MetricsWriter(place, tensorboard=False) as writer:
        Path(place, PROBLEMS_FILE).symlink_to("/dev/full")
        writer.write_problems(1, [0], [1], [1])


def _fail_in_a_beat(watchdog: Watchdog) -> None:
    """Fail after the watchdog's thread has read the heartbeats and before it judges them."""
    receive, has_read = watchdog._receive, threading.Event()

    def slowly(ranks: range) -> dict[int, Heartbeat]:
        found = receive(ranks)
        has_read.set()
        while watchdog._failure is None:
            time.sleep(0.01)
        return found

    watchdog._receive = slowly  # type: ignore[method-assign]
    has_read.wait()
    raise RuntimeError("boom in a beat")


FAULTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "comes late": lambda: time.sleep(10),
    "hangs": lambda: time.sleep(600),
    # As "hangs", where no rank shows that it waits in a collective.
    "hangs unseen": lambda: time.sleep(600),
    # Compiled code that lets no other thread of Python run, after some beats of the watchdog.
    "holds the GIL": lambda: (time.sleep(2), ctypes.PyDLL(None).sleep(600)),
    "holds the GIL at once": lambda: ctypes.PyDLL(None).sleep(600),
    # A file name that is not UTF-8, as Python has it.
    "fails": lambda: _raise(RuntimeError("boom \udcff")),
    "has no room": _meet_a_full_disk,
    "signalled": lambda: os.kill(os.getpid(), signal.SIGTERM),
}
Fault = tuple[str, str, int, int]
"""A name of FAULTS, and the phase, step and rank that meet it; "has no time": all ranks;
"fails in a beat": of run_phases alone."""


def settings(hf: Path, run_dir: Path, **sections: dict[str, Any]) -> VapoConfig:
    """Two tensor-parallel processes, three steps, and what else is given."""
    tree: dict[str, dict[str, Any]] = {
        "parallel": {"world_size": 2, "tensor_model_parallel_size": 2},
        "algorithm": {"policy_steps": 3},
        "optimizer": {"actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2},
        "logging": {"run_dir": str(run_dir), "tensorboard": False},
        "checkpoint": {"every_steps": 1, "hf_export": False},
    }
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    return config(hf, **tree)


def train(
    hf: Path, dump: Path, run_dir: Path, sections: dict[str, Any], fault: Fault | None
) -> int:
    """Train on a dump; a command's function."""
    from vapo_megatron.parallel.health import early_stop
    from vapo_megatron.training.loop import VapoTrainer

    early_stop.block_signals()

    def run() -> None:
        with VapoTrainer(settings(hf, run_dir, **sections), dump) as trainer:
            inner = trainer.phase

            @contextlib.contextmanager
            def meeting(name):
                with inner(name) as show:
                    if fault and fault[1:] == (name, trainer.watchdog.step, trainer.ranks.rank):
                        FAULTS[fault[0]]()
                    yield show

            def evaluate(*_):
                if fault and fault[:3] == ("has no time", "evaluation", trainer.watchdog.step):
                    raise Stopped
                return {}, []

            trainer.phase, trainer.source.evaluate = meeting, evaluate
            trainer.fit()

    return _told(run)


def run_phases(run_dir: Path, limits: dict[str, float], fault: Fault | None) -> int:
    """Start, sum something in every phase of some steps, and end; a command's function."""
    from vapo_megatron.parallel import backend
    from vapo_megatron.parallel.health.early_stop import EarlyStop
    from vapo_megatron.parallel.health.watchdog import Watchdog

    backend.initialize_distributed(60)
    rank = dist.get_rank()
    dist.barrier()  # Else the machine's load decides who comes late.
    if fault and fault[1:] == ("start", 0, rank):
        FAULTS[fault[0]]()
    timeouts = settings(run_dir, run_dir, timeouts=limits).timeouts
    watchdog = Watchdog(timeouts, run_dir, rank, dist.get_world_size(), EarlyStop(9).is_signalled)
    faults = {**FAULTS, "fails in a beat": lambda: _fail_in_a_beat(watchdog)}
    watchdog._runs_ahead |= fault is not None and fault[0] == "hangs unseen"

    def train_step(step: int) -> None:
        watchdog.step = step
        for phase in ("generation", "exchange", "critic_update"):
            with watchdog.phase(phase):
                if fault and fault[1:] == (phase, step, rank):
                    faults[fault[0]]()
                dist.all_reduce(torch.ones(1))

    def run() -> None:
        with watchdog.reporting():
            for step in (1, 2, 3):
                train_step(step)
            dist.barrier()
        watchdog.close()

    return _told(run)


def _told(run: Callable[[], None]) -> int:
    """Tell a mistake as commands do."""
    try:
        run()
    except UserError as error:
        tell(f"error: {error}")
        return 2
    return 0
