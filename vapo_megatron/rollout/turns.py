"""Episodes as work for an engine: after each turn the environment answers, and the episode goes on.

A turn ends where vLLM ends a response. The replica's first rank then asks the environment, while
the engine samples other responses; its answers come back in any order, and all ranks of the replica
are told of the same ones at the same time, so that they begin the same requests. What is sampled
depends on the episode alone: a turn's random numbers follow from the episode's seed and the number
of tokens that it has sampled.

Imports neither torch nor vllm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from vapo_megatron.data.rollout import Rollout, Turn
from vapo_megatron.rollout.requests import Request, Waiting, Work

IDLE_SECONDS = 0.05
"""How long a replica that samples nothing waits for an answer before it looks at its time."""


class Answer(NamedTuple):
    """What an environment has answered, in tokens: to a turn, or at an episode's beginning."""

    position: int
    """Rollout.position."""
    ids: Sequence[int] = ()
    """Of the observation, with the template's tokens around it."""
    reward: float = 0.0
    """The turn's own."""
    is_over: bool = False
    """The episode ends here."""
    prompt_ids: Sequence[int] | None = None
    """At an episode's beginning: the prompt, with what the environment says before any action."""


class Players(Protocol):
    """Environments of a replica's episodes, on its first rank."""

    def ask(self, rollout: Rollout) -> None:
        """Begin to play the turn that a rollout ends with; without tokens, the episode itself."""

    def answers(self, wait_seconds: float) -> list[Answer]:
        """Return those that have come; wait for the first of them so long at most."""

    def end(self, position: int) -> None:
        """End an episode that a limit has cut, and that would have gone on."""


class Limits(NamedTuple):
    """Of an episode."""

    max_turns: int
    max_action_tokens: int | None
    """None: as many as the response may still have."""
    max_tokens: int
    """Of actions and observations together: rollout.max_response_tokens."""


class Turns:
    """Lets the responses of some work go on turn by turn; every rank of a replica has one."""

    def __init__(
        self,
        work: Work,
        players: Players | None,
        told: Callable[[Any], Any],
        limits: Limits,
    ) -> None:
        """Begin nothing yet.

        Args:
            work: of episodes: where they come from, and who is told of finished ones.
            players: None on ranks other than the replica's first.
            told: see RolloutEngine.told.
            limits: of an episode.
        """
        self._inner, self._players, self._told, self._limits = work, players, told, limits
        self._seeds = dict[int, int]()
        self._waiting = dict[int, Rollout]()

    @property
    def work(self) -> Work:
        """What the engine is given."""
        waiting = Waiting(lambda: len(self._waiting), self._back)
        return self._inner._replace(take=self._take, ended=self._ended, waiting=waiting)

    def _take(self, room: int) -> list[Request]:
        """Begin episodes; each samples once its environment has said what follows the prompt."""
        for request in self._inner.take(room):
            self._seeds[request.rollout.position] = request.seed
            self._wait(request.rollout)
        return []

    def _ended(self, rollout: Rollout) -> None:
        """Ask for an answer to a turn; one that a limit has cut is the last."""
        if rollout.truncated:
            self._cut(with_turn(rollout, 0.0))
        else:
            self._wait(rollout)

    def _wait(self, rollout: Rollout) -> None:
        self._waiting[rollout.position] = rollout
        if self._players is not None:
            self._players.ask(rollout)

    def _back(self, is_idle: bool) -> list[Request]:
        """Let those go on whose answers have come."""
        seconds = IDLE_SECONDS if is_idle else 0.0
        came = self._told(self._players.answers(seconds) if self._players is not None else [])
        found = []
        for answer in came:
            rollout = self._waiting.pop(answer.position)
            if answer.prompt_ids is not None:
                prompt = dataclasses.replace(rollout.prompt, token_ids=tuple(answer.prompt_ids))
                rollout = dataclasses.replace(rollout, prompt=prompt)
            rollout = with_turn(rollout, answer.reward)
            if answer.is_over:
                self._finish(rollout)
                continue
            after = rollout.answered(answer.ids)
            left = self._limits.max_tokens - len(after.token_ids) - after.num_inserted
            if left < 1 or len(after.turns) == self._limits.max_turns:
                self._cut(dataclasses.replace(rollout, truncated=True))
                continue
            seed = self._seeds[answer.position]
            found.append(Request(after, seed, self._limits.max_action_tokens))
        return found

    def _cut(self, rollout: Rollout) -> None:
        if self._players is not None:
            self._players.end(rollout.position)
        self._finish(rollout)

    def _finish(self, rollout: Rollout) -> None:
        del self._seeds[rollout.position]
        self._inner.ended(rollout)


def with_turn(rollout: Rollout, reward: float) -> Rollout:
    """Return it with the turn that it ends with; before the first there is none."""
    end = len(rollout.token_ids)
    if not end:
        return rollout
    return dataclasses.replace(rollout, turns=(*rollout.turns, Turn(end, reward)))
