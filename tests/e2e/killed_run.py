"""A run that is killed at a moment: every rank, torchrun, and all that these have started.

torchrun ... tests/e2e/killed_run.py MOMENT RECORDS [arguments of vapo_megatron.train]

MOMENT is JSON of moments.Moment; where the run really was is appended to the file RECORDS. One
function is wrapped to watch the moment; the package is as it is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

import psutil

from tests.e2e.moments import KINDS, Moment, find, halves
from vapo_megatron.cli.train import main
from vapo_megatron.parallel.health import early_stop

LOADED = ("vapo_megatron.training.step", "vapo_megatron.rollout.vllm.engine")
"""What a run loads, in its order: the first brings megatron-core, the second vLLM."""


class Watch:
    """Of one moment, on the rank that meets it."""

    def __init__(self, moment: Moment, records: str) -> None:
        """Wrap the function."""
        # As the package does, before anything that it starts has a thread.
        early_stop.block_signals()
        for name in LOADED:
            importlib.import_module(name)
        from vapo_megatron.parallel.health.watchdog import Watchdog

        self._moment, self._kind, self._records = moment, KINDS[moment.kind], records
        self._num_calls, self._watchdog = 0, None
        begin = Watchdog.__init__

        @functools.wraps(begin)
        def noted(watchdog: Any, *arguments: Any) -> None:
            self._watchdog = watchdog
            begin(watchdog, *arguments)

        Watchdog.__init__ = noted
        owner, name = find(self._kind.target)
        setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not self._is_it(*arguments):
                return original(*arguments, **keywords)
            if self._kind.when == "half":
                halves()[self._kind.target](original, *arguments)
            if self._kind.when == "after":
                original(*arguments, **keywords)
            if self._moment.delay_seconds:
                threading.Timer(self._moment.delay_seconds, self._kill).start()
                return original(*arguments, **keywords)
            self._kill()

        return call

    def _is_it(self, *arguments: Any) -> bool:
        watchdog, kind, moment = self._watchdog, self._kind, self._moment
        if watchdog is None:
            return False
        is_early = not kind.starts and watchdog.step < moment.step
        if is_early or not kind.counts(watchdog._phase, *arguments):
            return False
        self._num_calls += 1
        return self._num_calls == moment.call

    def _kill(self) -> NoReturn:
        """Nobody can answer: torchrun is the first, this process the last."""
        watchdog, launcher = self._watchdog, psutil.Process().parent()
        found = {"phase": watchdog._phase, "step": watchdog.step, "rank": self._moment.rank}
        family = [launcher, *launcher.children(recursive=True)]
        line = json.dumps({**self._moment._asdict(), **found, "killed": len(family)})
        with open(self._records, "a") as file:
            file.write(line + "\n")
        for process in family:
            if process.pid != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        raise AssertionError("it lives")


if __name__ == "__main__":
    given = Moment(**json.loads(sys.argv[1]))
    if int(os.environ["RANK"]) == given.rank:
        Watch(given, sys.argv[2])
    sys.exit(main(sys.argv[3:]))
