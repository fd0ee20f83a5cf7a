"""What a replica's environments say, in tokens: text becomes ids here, and actions become text.

On the first rank of a replica alone. Of each episode it keeps what a response ends with: the
environment's verdict, how long its calls took, and whether it failed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from vapo_megatron.config import RewardConfig
from vapo_megatron.config.reward import ENVIRONMENT
from vapo_megatron.data.chat import template_options
from vapo_megatron.data.rollout import Episode, Prompt, Rollout
from vapo_megatron.environments.play import Play, Played
from vapo_megatron.environments.step import CUT, Observation
from vapo_megatron.errors import DataError
from vapo_megatron.reward.shaping import scored_verdict
from vapo_megatron.reward.verifier import Status, Verdict
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.tokenizer import decode_responses
from vapo_megatron.rollout.turn_tokens import TurnTokens
from vapo_megatron.rollout.turns import Answer


class EnvironmentPlayers:
    """The players of turns.Turns, by a user's environment.

    Args:
        play: has been started.
        inputs: has the tokenizer.
        reward: of the run.
        max_prompt_tokens: of a prompt with what the environment says before any action.
        max_observation_tokens: of an observation's texts.

    Raises:
        ConfigError: the chat template allows no episodes; see TurnTokens.
    """

    def __init__(
        self,
        play: Play,
        inputs: Inputs,
        reward: RewardConfig,
        *,
        max_prompt_tokens: int,
        max_observation_tokens: int,
    ) -> None:
        self._play, self._tokenizer, self._reward = play, inputs.tokenizer, reward
        self._tokens = TurnTokens(inputs.tokenizer, inputs.stop_token_ids, inputs.date)
        self.end_of_turn = self._tokens.end_of_turn
        self._max_prompt_tokens = max_prompt_tokens
        self._max_observation_tokens = max_observation_tokens
        self._asked = dict[int, Rollout]()
        self._known = dict[int, Episode]()

    def ask(self, rollout: Rollout, seed: int) -> None:
        """See turns.Players."""
        self._asked[rollout.position] = rollout
        if rollout.token_ids:
            start = rollout.turns[-1].end if rollout.turns else 0
            (action,) = decode_responses(self._tokenizer, [rollout.token_ids[start:]])
            self._play.act(rollout.position, action)
        else:
            self._known[rollout.position] = Episode()
            self._play.begin(rollout.position, rollout.prompt.problem, seed)

    def answers(self, wait_seconds: float) -> list[Answer]:
        """See turns.Players."""
        found = []
        for position, played in self._play.answers(wait_seconds):
            assert isinstance(position, int), "episodes are played by their position"
            found.append(self._answer(position, played))
        return found

    def finish(self, rollout: Rollout) -> Rollout:
        """See turns.Players."""
        known, cut = self._known.pop(rollout.position), ""
        if rollout.episode is not None:
            cut = rollout.episode.cut
            self._play.end(rollout.position)
        known = known._replace(cut=cut)
        name = rollout.prompt.problem.verifier or self._reward.verifier
        if known.verdict is not None:
            verdict = scored_verdict(known.verdict, self._reward, name)
            known = known._replace(verdict=verdict)
        elif self._reward.use_of(name) == ENVIRONMENT:
            known = _by_rewards(known, math.fsum(turn.reward for turn in rollout.turns))
        return dataclasses.replace(rollout, episode=known)

    def drop(self) -> None:
        """End the episodes that nobody will finish."""
        for position in self._known:
            self._play.end(position)
        self._known.clear()
        self._asked.clear()

    def _answer(self, position: int, played: Played) -> Answer:
        rollout, known = self._asked.pop(position), self._known[position]
        known = known._replace(
            seconds=known.seconds + played.seconds, verdict=played.verdict,
            failed_calls=known.failed_calls + played.failed_calls,
        )  # fmt: skip
        ids, prompt = list[int](), None
        if not played.done:
            try:
                said = self._shortened(played.observation)
                if rollout.token_ids:
                    ids = self._tokens.after_action(said, _variables(rollout.prompt))
                else:
                    prompt = self._begun(rollout.prompt, said)
            except DataError as error:
                self._play.end(position)
                played = Played(done=True, failed=True, note=str(error))
        if played.failed:
            known = known._replace(failed=True, verdict=Verdict("failed", note=played.note))
        self._known[position] = known
        return Answer(position, ids, played.reward, played.done, prompt)

    def _begun(self, prompt: Prompt, said: Observation) -> dict[str, tuple[int, ...]]:
        """Return a prompt's ids with what the environment says first; the critic's have it, too."""
        given = {"token_ids": prompt.token_ids, "critic_token_ids": prompt.critic_token_ids}
        found = {
            name: tuple(self._tokens.after_prompt(ids, said, _variables(prompt)))
            for name, ids in given.items()
            if ids is not None
        }
        longest = max(map(len, found.values()))
        if longest > self._max_prompt_tokens:
            raise DataError(
                f"with what the environment says first a prompt has {longest} tokens, more than "
                f"rollout.max_prompt_tokens={self._max_prompt_tokens}"
            )
        return found

    def _shortened(self, said: Observation) -> Observation:
        """Cut an observation's texts to the limit, all messages together; marks what is cut."""
        left = self._max_observation_tokens
        if isinstance(said, str):
            return self._cut(said, left)[0]
        found = []
        for message in said:
            text, length = self._cut(message["content"], left)
            found.append({**message, "content": text})
            left = max(left - length, 0)
        return found

    def _cut(self, text: str, most: int) -> tuple[str, int]:
        """Return a text of about so many tokens at most, and its tokens before that."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= most:
            return text, len(ids)
        start = self._tokenizer.decode(ids[:most], clean_up_tokenization_spaces=False)
        return start.rstrip("\ufffd") + CUT, len(ids)


def _variables(prompt: Prompt) -> Mapping[str, Any]:
    """Return the chat template's variables that a row has set, so that all its turns have them."""
    found: Mapping[str, Any] = template_options(prompt.metadata, "data").get("variables", {})
    return found


def _by_rewards(known: Episode, total: float) -> Episode:
    """Judge an episode by the sum of its turns' rewards, where the environment has not."""
    if known.cut:
        return known._replace(verdict=Verdict("wrong", note=f"cut by {known.cut}"))
    status: Status = "correct" if total > 0 else "wrong"
    note = f"its turns' rewards are {total:g} together"
    return known._replace(verdict=Verdict(status, note=note), is_paid=True)
