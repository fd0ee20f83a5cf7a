"""Makes problems of reasoning_gym's tasks, in a worker process.

The pool's processes have one PYTHONHASHSEED, on which the problems of some tasks depend.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

from vapo_megatron.reward import gym
from vapo_megatron.reward.gym_verifier import FORMS, best_forms, mistake, scorer

SIZE = 500
"""Problems of one data set; those behind them come from data sets with other seeds."""
CORRECT = 1.0


def make_handler() -> tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]:
    """Return what makes problems, and {"tasks": their names, "missing": package -> tasks}."""
    names = list(gym.load())
    missing = {
        package: tasks for package, tasks in gym.NEEDED_BY.items() if not {*tasks} <= {*names}
    }
    return _make, {"tasks": names, "missing": missing}


def _make(asked: dict[str, Any]) -> dict[str, Any]:
    """Make `count` problems from number `first` on; 0 only looks at the configuration."""
    task, config = asked["task"], asked["config"]
    gym.create(task, config, seed=0)
    numbers = range(asked["first"], asked["first"] + asked["count"])
    return {"problems": [_problem(task, json.dumps(config), asked["stream"], n) for n in numbers]}


def _problem(task: str, config: str, stream: str, number: int) -> dict[str, Any]:
    """Return a problem with what is wrong with it, if anything; see gym_problems.Drawn."""
    block, index = divmod(number, SIZE)
    data = _data_set(task, config, _seed(f"{stream}/{block}"))
    _seed_all(_seed(f"{stream}/{number}"))
    try:
        entry = data[index]
    except Exception as error:  # Some tasks try a few times, and give up.
        return {"question": None, "reason": f"cannot be made: {type(error).__name__}: {error}"}
    found = {"question": entry["question"], "answer": entry["answer"]}
    try:
        text = gym.write_row(gym.Row(task, json.loads(config), entry))
        row = gym.read_row(text)
        reason = mistake(row, CORRECT) or _unlike(row, entry)
        is_one_line = entry["answer"] is None or FORMS[0] in best_forms(row, CORRECT)
    except Exception as error:  # Whatever a scorer raises.
        return {**found, "reason": f"is refused by its task: {type(error).__name__}: {error}"[:300]}
    return {**found, "row": text, "reason": reason, "is_one_line": is_one_line}


def _unlike(row: gym.Row, entry: dict[str, Any]) -> str | None:
    """Return what is wrong if the row, read back, is not scored as the entry was."""
    for answer in filter(None, (entry["answer"], "0", "A B")):
        scores = [_score(row, answer, each) for each in (entry, row.entry)]
        if scores[0] != scores[1]:
            return f"is scored {scores[1]} for {answer!r:.80} from JSON, and {scores[0]} before"
    return None


def _score(row: gym.Row, answer: str, entry: dict[str, Any]) -> float | str:
    try:
        return gym.score(scorer(row), row.task, answer, entry)[0]
    except Exception as error:
        return type(error).__name__


@functools.lru_cache(maxsize=2)
def _data_set(task: str, config: str, seed: int) -> Any:
    _seed_all(seed)
    return gym.create(task, json.loads(config), seed=seed, size=SIZE)


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1


def _seed_all(seed: int) -> None:
    """For tasks that draw from the libraries' own states."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
