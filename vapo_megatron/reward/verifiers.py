"""The verifiers of a run by name; each problem is judged by the one that its row names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self, TypeVar

from vapo_megatron.config import RewardConfig
from vapo_megatron.config.reward import HYBRID, REWARD_MODEL
from vapo_megatron.data.problems import Problem
from vapo_megatron.errors import ConfigError
from vapo_megatron.reward.built_in import build
from vapo_megatron.reward.hybrid import choose
from vapo_megatron.reward.isolated import IsolatedVerifier
from vapo_megatron.reward.shaping import scored_verdict
from vapo_megatron.reward.trial import failed_trial, rows_to_try
from vapo_megatron.reward.verifier import RunningVerifier, Verdict

T = TypeVar("T")


def default_name(reward: RewardConfig, verifier: object | None = None) -> str:
    """Return what metrics call the verifier of rows that name none; verifier: see Verifiers."""
    if verifier is None:
        return reward.verifier.rpartition("/")[2]  # A label has no slash; see config.metrics.
    name = getattr(verifier, "__name__", type(verifier).__name__)
    return re.sub(r"\W", "_", name)  # "<lambda>"


class Verifiers:
    """All verifiers of a run, as one: a RunningVerifier, and a context manager that closes it.

    Args:
        reward: which there are, and their limits.
        default: a verifier's instance or class, or a function, in place of reward.verifier; None:
            that one.
    """

    def __init__(self, reward: RewardConfig, default: object | None = None) -> None:
        self._reward = reward
        self._default = default
        self._running: dict[str | None, RunningVerifier] = {}

    def start(self) -> None:
        """Start the default verifier's processes; others start when a problem needs them."""
        if self._default is not None or self._reward.verifier != HYBRID:
            self._of(None).start()

    def load(self) -> None:
        """Load every configured verifier, whether a row names it or not. Raises ConfigError."""
        is_hybrid = self._default is None and self._reward.verifier == HYBRID
        for name in (*self._reward.hybrid, *([] if is_hybrid else [None]), *self._reward.verifiers):
            self._of(name).unusable([])

    def try_out(self, rows: Iterable[Problem]) -> None:
        """Call every verifier of the user's own once, with a made-up response.

        Args:
            rows: of the data; each verifier gets the first that it judges. One that judges none is
                not called.

        Raises:
            ConfigError: what it returned or raised, and what is due.
        """
        given = self._default is not None
        for name, some in rows_to_try(rows, self._reward, default_is_given=given).items():
            verifier, label = self._of(name), self._reward.verifier if name is None else name
            assert isinstance(verifier, IsolatedVerifier), "it is a user's own"
            if wrong := failed_trial(verifier, some, self._reward, label):
                raise ConfigError(
                    f"{self._field(name)}: called once with a made-up response, it {wrong}; "
                    "correct it"
                )

    def _field(self, name: str | None) -> str:
        """Return the field that names a verifier of the user's own, with its value."""
        if name is None:
            return f"verifier={default_name(self._reward, self._default)}"
        use = self._reward.use_of(name)
        is_named = name in self._reward.verifiers
        return f"reward.verifiers.{name}.use={use}" if is_named else f"reward.verifier={use}"

    def sees_group(self, problem: Problem) -> bool:
        """Return whether its verifier is given all responses to a problem at once."""
        verifier = self._of(problem.verifier)
        return isinstance(verifier, IsolatedVerifier) and verifier.sees_group

    def sees_groups(self) -> bool:
        """Return whether any verifier that has judged or checked something sees groups."""
        running = self._running.values()
        return any(isinstance(v, IsolatedVerifier) and v.sees_group for v in running)

    def score(self, responses: Sequence[str], problems: Sequence[Problem]) -> Iterator[Verdict]:
        """Judge each response by its problem's verifier; see RunningVerifier.

        What is correct follows from the score where the configuration says so.
        """
        verdicts = self._by_verifier(
            problems,
            lambda verifier, picked: verifier.score(
                [responses[i] for i in picked], [problems[i] for i in picked]
            ),
        )
        return (
            scored_verdict(verdict, self._reward, problem.verifier or self._reward.verifier)
            for verdict, problem in zip(verdicts, problems, strict=True)
        )

    def unusable(
        self, problems: Sequence[Problem], no_reward_model: str | None = None
    ) -> dict[int, str]:
        """Return index -> what is wrong; see RunningVerifier and examine."""
        return self.examine(problems, no_reward_model)[1]

    def examine(
        self, problems: Sequence[Problem], no_reward_model: str | None
    ) -> tuple[dict[int, str], dict[int, str]]:
        """Choose verifiers for what hybrid judges, and look for problems that cannot be judged.

        Args:
            problems: of a data set.
            no_reward_model: what is wrong with a row that the reward model judges; None: nothing.

        Returns:
            (index -> the verifier that hybrid.py chose, index -> what is wrong).
        """
        asked = [i for i, problem in enumerate(problems) if self._name(problem) == HYBRID]
        found = choose(
            [problems[i] for i in asked],
            self._reward,
            lambda name, some: self._of(name).unusable(some),
        )
        chosen, reasons = ({asked[i]: text for i, text in each.items()} for each in found)
        known = []
        for i, problem in enumerate(problems):
            name = chosen.get(i, problem.verifier)
            if no_reward_model is not None and self._is_scored_later(name):
                reasons[i] = no_reward_model
            elif name not in (None, *self._reward.names):
                names = ", ".join(self._reward.names)
                reasons[i] = f"has the verifier {name!r}, which is none of {names}"
            elif i not in chosen and i not in reasons:
                known.append(i)

        def check(verifier: RunningVerifier, picked: list[int]) -> list[str | None]:
            found = verifier.unusable([problems[known[i]] for i in picked])
            return [found.get(i) for i in range(len(picked))]

        checked = self._by_verifier([problems[i] for i in known], check)
        reasons |= {i: reason for i, reason in zip(known, checked) if reason is not None}
        return chosen, reasons

    def same_answers(self, pairs: Sequence[tuple[Problem, str, str]]) -> list[bool]:
        """Compare answers by their problem's verifier; see RunningVerifier."""
        found = self._by_verifier(
            [problem for problem, _, _ in pairs],
            lambda verifier, picked: verifier.same_answers([pairs[i] for i in picked]),
        )
        return list(found)

    def forget(self) -> None:
        """Forget verdicts; see RunningVerifier."""
        for verifier in list(self._running.values()):
            verifier.forget()

    def close(self) -> None:
        """End all processes; using a verifier again starts new ones."""
        for verifier in self._running.values():
            verifier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _by_verifier(
        self,
        problems: Sequence[Problem],
        call: Callable[[RunningVerifier, list[int]], Iterable[T]],
    ) -> Iterator[T]:
        """Call each verifier once with the indices of its problems -> results in order.

        All have been called on return; the iteration takes their results.
        """
        indices: dict[str | None, list[int]] = {}
        for i, problem in enumerate(problems):
            indices.setdefault(problem.verifier, []).append(i)
        results = {name: iter(call(self._of(name), some)) for name, some in indices.items()}
        return (next(results[problem.verifier]) for problem in problems)

    def _is_scored_later(self, name: str | None) -> bool:
        if name is None and self._default is not None:
            return False
        use = self._reward.use_of(self._reward.verifier if name is None else name)
        return use == REWARD_MODEL

    def _name(self, problem: Problem) -> str | None:
        """Return the name of the problem's verifier; None: the one given in its place."""
        default = self._reward.verifier if self._default is None else None
        return problem.verifier or default

    def _of(self, name: str | None) -> RunningVerifier:
        """Return a running verifier by its row's name; None: the default."""
        if name is None and self._default is None:
            name = self._reward.verifier
        if name not in self._running:
            assert name != HYBRID, "its rows name the verifiers that were chosen"
            self._running[name] = build(name, self._reward, self._default)
        return self._running[name]
