"""Episodes as work for an engine: after each turn the environment answers, and the episode goes on.

A turn ends where vLLM ends a response. The replica's first rank then asks the environment, while
the engine samples other responses; its answers come back in any order, and all ranks of the replica
are told of the same ones at the same time, so that they begin the same requests. What is sampled
depends on the episode alone: a turn's random numbers follow from the episode's seed and the number
of tokens that it has sampled.

Imports neither torch nor vllm.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from vapo_megatron.data.rollout import Episode, Rollout, Turn
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
    """The episode ends here; at its beginning, after a token, because there is no empty response.
    """
    prompt: Mapping[str, tuple[int, ...]] | None = None
    """At an episode's beginning: Prompt.token_ids and, where there are some, critic_token_ids, with
    what the environment says before any action."""


class Players(Protocol):
    """Environments of a replica's episodes, on its first rank."""

    def ask(self, rollout: Rollout, seed: int) -> None:
        """Begin to play the turn that a rollout ends with; without tokens, the episode itself.

        seed: of the episode.
        """

    def answers(self, wait_seconds: float) -> list[Answer]:
        """Return those that have come; wait for the first of them so long at most."""

    def finish(self, rollout: Rollout) -> Rollout:
        """Return a finished episode with what is known of it.

        rollout: has Episode.cut where it would have gone on; then the environment ends here.
        """


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
        at_once: int,
    ) -> None:
        """Begin nothing yet.

        Args:
            work: of episodes: where they come from, and who is told of finished ones.
            players: None on ranks other than the replica's first.
            told: see RolloutEngine.told.
            limits: of an episode.
            at_once: episodes that are played concurrently; each has a process of its own.
        """
        self._inner, self._players, self._told, self._limits = work, players, told, limits
        self._at_once = at_once
        self._later = collections.deque[Request]()
        self._seeds = dict[int, int]()
        """Of the episodes that are being played, by position."""
        self._waiting = dict[int, Rollout]()
        self._over = set[int]()
        self.idle_seconds = 0.0
        """In which this replica sampled nothing and waited for answers."""

    @property
    def work(self) -> Work:
        """What the engine is given."""
        waiting = Waiting(lambda: len(self._waiting), self._back)
        return self._inner._replace(take=self._take, ended=self._ended, waiting=waiting)

    def _take(self, room: int) -> list[Request]:
        """Begin episodes; each samples once its environment has said what follows the prompt."""
        if not self._later:
            self._later.extend(self._inner.take(room))
        while self._later and len(self._seeds) < self._at_once:
            request = self._later.popleft()
            self._seeds[request.rollout.position] = request.seed
            self._wait(request.rollout)
        return []

    def _ended(self, rollout: Rollout) -> None:
        """Ask for an answer to a turn; one that a limit has cut is the last."""
        if rollout.position in self._over:
            self._finish(with_turn(rollout, 0.0))
        elif rollout.truncated:
            is_full = len(rollout.token_ids) + rollout.num_inserted >= self._limits.max_tokens
            limit = "rollout.max_response_tokens" if is_full else "environment.max_action_tokens"
            self._cut(with_turn(rollout, 0.0), limit)
        else:
            self._wait(rollout)

    def _wait(self, rollout: Rollout) -> None:
        self._waiting[rollout.position] = rollout
        if self._players is not None:
            self._players.ask(rollout, self._seeds[rollout.position])

    def _back(self, is_idle: bool) -> list[Request]:
        """Let those go on whose answers have come."""
        start = time.monotonic()
        seconds = IDLE_SECONDS if is_idle else 0.0
        came = self._told(self._players.answers(seconds) if self._players is not None else [])
        if is_idle:
            self.idle_seconds += time.monotonic() - start
        return [request for answer in came for request in self._answered(answer)]

    def _answered(self, answer: Answer) -> list[Request]:
        """Let an episode go on by an answer: with its next turn, or to its end."""
        rollout, limits = self._waiting.pop(answer.position), self._limits
        seed, longest = self._seeds[answer.position], limits.max_action_tokens
        if answer.prompt is not None:
            prompt = dataclasses.replace(rollout.prompt, **answer.prompt)  # type: ignore[arg-type]
            rollout = dataclasses.replace(rollout, prompt=prompt)
        if answer.is_over and not rollout.token_ids:
            self._over.add(answer.position)
            return [Request(rollout, seed, 1)]
        rollout = with_turn(rollout, answer.reward)
        if answer.is_over:
            self._finish(rollout)
            return []
        after = rollout.answered(answer.ids)
        if len(after.turns) == limits.max_turns:
            self._cut(rollout, "environment.max_turns")
        elif len(after.token_ids) + after.num_inserted >= limits.max_tokens:
            self._cut(rollout, "rollout.max_response_tokens")
        else:
            return [Request(after, seed, longest)]
        return []

    def _cut(self, rollout: Rollout, limit: str) -> None:
        self._finish(dataclasses.replace(rollout, truncated=True, episode=Episode(limit)))

    def _finish(self, rollout: Rollout) -> None:
        del self._seeds[rollout.position]
        self._over.discard(rollout.position)
        self._inner.ended(rollout if self._players is None else self._players.finish(rollout))


def with_turn(rollout: Rollout, reward: float) -> Rollout:
    """Return it with the turn that it ends with; before the first there is none."""
    end = len(rollout.token_ids)
    if not end:
        return rollout
    return dataclasses.replace(rollout, turns=(*rollout.turns, Turn(end, reward)))
