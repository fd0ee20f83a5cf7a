"""Checks before the start: an episode of the environment, as the policy would see it."""

from __future__ import annotations

import dataclasses
import itertools
from array import array

from vapo_megatron.config import VapoConfig
from vapo_megatron.data.rollout import Rollout
from vapo_megatron.environments.configured import build_play
from vapo_megatron.errors import ConfigError
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.players import EnvironmentPlayers
from vapo_megatron.rollout.turns import Answer, with_turn

_ACTION = "1"
"""What is played, as any environment has to answer it."""


def try_episode(config: VapoConfig, inputs: Inputs) -> list[str]:
    """Play an action of the first training prompt's episode.

    Returns:
        What the policy would see, in lines, what is sampled and what is inserted apart; empty
        without an environment.

    Raises:
        ConfigError: the environment does not load, or fails at its beginning.
    """
    environment = config.environment
    if not environment.is_on or inputs.dataset is None:
        return []
    play = build_play(environment, config.reward)
    try:
        play.start()
        players = EnvironmentPlayers(
            play, inputs, config.reward, max_prompt_tokens=config.rollout.max_prompt_tokens,
            max_observation_tokens=environment.max_observation_tokens,
        )  # fmt: skip
        play.check()
        rollout = Rollout.empty(inputs.dataset.problems[0], 0, 0, 0)
        begun = _asked(players, rollout)
        if begun.is_over:
            verdict = players.finish(with_turn(rollout, 0.0)).episode
            why = "it is over" if verdict is None or not verdict.failed else verdict.verdict.note
            raise ConfigError(
                f"the environment cannot begin the first prompt's episode: {why}; correct it"
            )
        assert begun.prompt is not None, "it begins with its prompt"
        action = inputs.tokenizer.encode(_ACTION, add_special_tokens=False)
        ids = array("i", [*action, players.end_of_turn])
        prompt = dataclasses.replace(rollout.prompt, **begun.prompt)  # type: ignore[arg-type]
        played = dataclasses.replace(rollout, prompt=prompt, token_ids=ids)
        return _shown(inputs, played, _asked(players, played))
    finally:
        play.close()


def _asked(players: EnvironmentPlayers, rollout: Rollout) -> Answer:
    """Return the answer to a rollout's last turn, which fails where it exceeds its time."""
    players.ask(rollout, 0)
    while True:
        for answer in players.answers(1.0):
            return answer


def _shown(inputs: Inputs, played: Rollout, answer: Answer) -> list[str]:
    parts = [
        ("prompt, with what the environment says first", played.prompt.token_ids),
        ("an action, made up", played.token_ids),
        ("what the environment answers", answer.ids),
    ]
    found = ["an episode of the first prompt, as the policy would see it:"]
    for title, ids in parts:
        text = inputs.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        found.append(f"  {title} ({len(ids)} tokens):")
        found += [f"    | {line}" for line in itertools.islice(text.splitlines() or [""], 40)]
    end = "; the episode is over" if answer.is_over else ""
    return [*found, f"  reward of the action: {answer.reward:g}{end}"]
