"""Episodes of a run: starts its environment, and lets the responses of some work be answered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vapo_megatron.config import EnvironmentConfig, RewardConfig, RolloutConfig
from vapo_megatron.config.metrics import emits
from vapo_megatron.environments.configured import build_play
from vapo_megatron.environments.play import Play
from vapo_megatron.errors import ConfigError, UserError
from vapo_megatron.parallel.reduce import gather_objects
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.players import EnvironmentPlayers
from vapo_megatron.rollout.requests import Work
from vapo_megatron.rollout.turns import Limits, Turns

if TYPE_CHECKING:
    from vapo_megatron.rollout.vllm.engine import RolloutEngine


class Episodes:
    """One rank's; the first rank of a replica has the environment."""

    def __init__(
        self,
        environment: EnvironmentConfig,
        rollout: RolloutConfig,
        players: EnvironmentPlayers | None,
        play: Play | None,
    ) -> None:
        self._limits = Limits(
            environment.max_turns, environment.max_action_tokens, rollout.max_response_tokens
        )
        self._players, self._play = players, play
        self._idle_seconds = 0.0

    def take_idle_seconds(self) -> float:
        """Return how long this replica sampled nothing and waited since this was last called."""
        seconds, self._idle_seconds = self._idle_seconds, 0.0
        return seconds

    @contextlib.contextmanager
    def answering(self, work: Work, engine: RolloutEngine, max_tokens: int) -> Iterator[Work]:
        """Yield the work whose responses are answered; end what is unfinished after the body.

        max_tokens: of a response.
        """
        limits = self._limits._replace(max_tokens=max_tokens)
        turns = Turns(work, self._players, engine.told, limits, engine.at_once)
        try:
            yield turns.work
        finally:
            self._idle_seconds += turns.idle_seconds
            if self._players is not None:
                self._players.drop()

    def close(self) -> None:
        """End the environment's processes."""
        if self._play is not None:
            self._play.close()


def start_episodes(
    environment: EnvironmentConfig,
    rollout: RolloutConfig,
    reward: RewardConfig,
    inputs: Inputs,
    *,
    has_players: bool,
) -> Episodes | None:
    """Load the environment on the first rank of each replica; None: there is none. Collective.

    Raises:
        ConfigError: on every rank: it does not load, or the chat template allows no episodes.
    """
    if not environment.is_on:
        return None
    play, players, mistake = None, None, ""
    if has_players:
        try:
            play = build_play(environment, reward)
            play.start()
            players = EnvironmentPlayers(
                play, inputs, reward, max_prompt_tokens=rollout.max_prompt_tokens,
                max_observation_tokens=environment.max_observation_tokens,
            )  # fmt: skip
            play.check()
        except UserError as error:
            mistake = str(error)
    if mistake := max(gather_objects(mistake)):
        if play is not None:
            play.close()
        raise ConfigError(mistake)
    return Episodes(environment, rollout, players, play)


@emits("time/environment_waiting_seconds")
def waiting_metrics(seconds: Iterable[float | None]) -> dict[str, float]:
    """Return the longest time of the replicas'; None: there is no environment."""
    found = [each for each in seconds if each is not None]
    return {"time/environment_waiting_seconds": max(found)} if found else {}
