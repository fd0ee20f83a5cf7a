"""Environments of Gymnasium's API, whose step returns five values, as episodes of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vapo_megatron.environments.step import Step, seed_of
from vapo_megatron.reward.user_code import load


class FiveTuple:
    """An environment; see step.py. A subclass has what makes a registered one.

    Actions are given as the policy wrote them. An observation is text; where the info that comes
    with it has a `prefix` or `suffix`, as GEM's games have, these are put around it. What the row's
    problem has is not given, but for `columns`. The episode is over when it is terminated or
    truncated. Rewards are its own, so there is no verdict.

    Args:
        id: of a registered environment; None: there is an entry.
        entry: "package.module:NAME" or "path/to/file.py:NAME" of a class or function that makes
            one; None: there is an id.
        options: keyword arguments for making it.
        columns: of the row, which reset is given as its `options`; `prompt` and `answer` are two.

    Raises:
        ValueError: there are neither or both of id and entry.
    """

    registered: Callable[[str], Callable[..., Any]]
    """A registered environment's id -> what makes it of its options; a class has its own."""

    def __init__(
        self,
        id: str | None = None,
        entry: str | None = None,
        options: Mapping[str, Any] | None = None,
        columns: list[str] | None = None,
    ) -> None:
        if (id is None) == (entry is None):
            raise ValueError(f"id={id} and entry={entry}: exactly one of them must be given")
        self._columns = columns or []
        make: Callable[..., Any] = load(entry) if entry is not None else self.registered(str(id))
        self._environment = make(**(options or {}))

    def reset(self, problem: Any, seed: int) -> str:
        """Begin -> the first observation, which follows the prompt."""
        more: dict[str, Any] = {}
        if self._columns:
            row = {**problem.metadata, "prompt": problem.prompt, "answer": problem.answer}
            more["options"] = {name: row[name] for name in self._columns}
        # numpy's generators, which many environments seed, take 32 bits.
        observation, info = self._environment.reset(seed=seed_of(problem, seed) % 2**32, **more)
        return _framed(observation, info)

    def step(self, action: str) -> Step:
        """Act."""
        observation, reward, terminated, truncated, info = self._environment.step(action)
        return Step(
            _framed(observation, info),
            reward,
            bool(terminated) or bool(truncated),
            note="truncated by the environment" if truncated and not terminated else "",
        )

    def close(self) -> None:
        """End, where it can be ended."""
        if callable(close := getattr(self._environment, "close", None)):
            close()


def _framed(observation: Any, info: Any) -> Any:
    if not isinstance(observation, str) or not isinstance(info, Mapping):
        return observation  # What is no text is refused where every observation is checked.
    prefix, suffix = (info.get(name) for name in ("prefix", "suffix"))
    # GEM ends what it puts these around with the end of a line.
    if isinstance(suffix, str) and suffix and not observation.endswith("\n"):
        observation += "\n"
    return f"{prefix or ''}{observation}{suffix or ''}"
