"""A prompt, a response to it and the verdict on that, before they become tensors."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vapo_megatron.data.columns import PER_TOKEN, SAMPLED
from vapo_megatron.data.problems import Problem


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One problem of a data set."""

    index: int
    """Row in the data set: identifies the problem over the whole run, and seeds its sampling."""
    text: str
    token_ids: tuple[int, ...]
    answer: str
    """Ground truth, as the verifier reads it."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """The row's other columns."""
    source: str | None = None
    """See Problem."""
    critic_token_ids: tuple[int, ...] | None = None
    """What the critic is given in place of token_ids; None: those."""

    @property
    def problem(self) -> Problem:
        """What the verifier is given."""
        return Problem(self.text, self.answer, self.metadata, self.source)


class Turn(NamedTuple):
    """One action of an episode, with what the environment made of it."""

    end: int
    """Response tokens up to its last one."""
    reward: float
    """Its own."""


UNKNOWN_ROUTE = 255
"""In place of a number in `Rollout.routes`, where no router has chosen: experts are fewer."""
CUTS = ("", "rollout.max_response_tokens", "environment.max_action_tokens", "environment.max_turns")
"""Fields whose limits end an episode; dumps store their index."""


class Episode(NamedTuple):
    """What there is to say of a response that an environment has answered, beside its turns."""

    cut: str = ""
    """One of CUTS: what has truncated it; the first: nothing."""
    failed: bool = False
    """The environment did not answer."""
    seconds: float = 0.0
    """Of its calls, together."""
    verdict: Any = None
    """reward.verifier.Verdict of the environment's; None: the run's verifier judges."""
    is_paid: bool = False
    """The turns' rewards are all; the verdict has none."""
    failed_calls: int = 0
    """Calls of tools that were wrong, in all turns."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One response, sampled or given."""

    prompt: Prompt
    sample: int
    """Sample index within the prompt's group, 0..G-1."""
    position: int
    """Position in the step's repeated prompt list, 0..P*G-1: the same in every layout."""
    token_ids: array[int]
    """int32, typecode "i": the response, its stop token included."""
    logprobs: array[float] | None
    """float32, typecode "f", per response token: log-probability under the distribution that was
    sampled from; None: the data gave the response, and nothing has sampled it."""
    truncated: bool
    """True when a length limit ended the response, so that it has no stop token."""
    policy_version: int
    """Number of weight publications that the inference engine had seen, at the last token; 0 of a
    given response."""
    segments: tuple[tuple[int, int], ...] = ()
    """(version, number of tokens) one after the other, where several versions sampled it."""
    inserted: tuple[tuple[int, array[int]], ...] = ()
    """(before, ids): what something else wrote before response token number `before`, in order."""
    columns: Mapping[str, array[Any]] = dataclasses.field(default_factory=dict, hash=False)
    """Other numbers per response token, by their name in data/columns.py's SAMPLED."""
    turns: tuple[Turn, ...] = ()
    """Those that have ended, of a response that an environment answers."""
    episode: Episode | None = None
    """Once an environment has answered all of them; None: there is no environment."""
    routes: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
    """uint8 [rows, layers * experts per token]: the experts of the first tokens of `sequence`, as
    the latest policy that read them chose, layer by layer; None: nobody asked for them."""

    @classmethod
    def empty(cls, prompt: Prompt, sample: int, position: int, version: int) -> Rollout:
        """Return a response that has no tokens yet."""
        return cls(prompt, sample, position, array("i"), array("f"), False, version)

    @property
    def first(self) -> int:
        """Position of its group's first response; groups are contiguous and may differ in size."""
        return self.position - self.sample

    @property
    def num_inserted(self) -> int:
        """Tokens inserted between its own, such as tool results."""
        return sum(len(ids) for _, ids in self.inserted)

    @property
    def sequence(self) -> np.ndarray:
        """int32 [S]: all that the model sees, prompt, response tokens and inserted ones."""
        parts, done = [np.array(self.prompt.token_ids, np.int32)], 0
        own = np.array(self.token_ids, np.int32)
        for before, ids in self.inserted:
            parts += [own[done:before], np.array(ids, np.int32)]
            done = before
        return np.concatenate([*parts, own[done:]])

    @property
    def places(self) -> np.ndarray:
        """int32 [T]: where each response token stands in `sequence`."""
        places = np.arange(len(self.token_ids), dtype=np.int32) + len(self.prompt.token_ids)
        for before, ids in self.inserted:
            places[before:] += len(ids)
        return places

    @property
    def is_paid(self) -> bool:
        """Episode.is_paid."""
        return self.episode is not None and self.episode.is_paid

    @property
    def last_action(self) -> array[int]:
        """The tokens of the last turn; of a response without an environment, all of them."""
        return self.token_ids[self.turns[-2].end if len(self.turns) > 1 else 0 :]

    def answered(self, ids: Sequence[int]) -> Rollout:
        """Return it with what something else has written after its last token."""
        inserted = (*self.inserted, (len(self.token_ids), array("i", ids)))
        return dataclasses.replace(self, inserted=inserted) if len(ids) else self

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """As segments, of any response."""
        return self.segments or ((self.policy_version, len(self.token_ids)),)

    def extended(
        self,
        token_ids: array[int],
        logprobs: array[float],
        version: int,
        *,
        truncated: bool,
        routes: np.ndarray | None = None,
    ) -> Rollout:
        """Return it with the tokens that a version has sampled after it.

        routes: of the whole; None: nothing has been read since those that it has.
        """
        assert not self.columns, "numbers per token of a response that goes on would be too few"
        assert self.logprobs is not None, "a given response is complete"
        parts = [part for part in self.versions if part[1]]
        if token_ids:
            before = parts.pop()[1] if parts and parts[-1][0] == version else 0
            parts.append((version, before + len(token_ids)))
        return dataclasses.replace(
            self,
            token_ids=self.token_ids + token_ids,
            logprobs=self.logprobs + logprobs,
            truncated=truncated,
            policy_version=parts[-1][0] if parts else version,
            segments=tuple(parts) if len(parts) > 1 else (),
            routes=self.routes if routes is None else routes,
        )


STATUSES = ("correct", "wrong", "unparsable", "timed_out", "failed")
"""The verifier's possible verdicts; dumps store their index."""
PENDING = "pending"
"""Status of a response that the reward model is still to score."""


@dataclasses.dataclass(frozen=True)
class ScoredRollout:
    """A response, the verifier's verdict on it and its shaped reward."""

    rollout: Rollout
    text: str
    """Of the response, without special tokens: what was judged."""
    status: str
    """One of STATUSES, or PENDING."""
    reward: float
    """NaN while the verdict is pending."""
    score: float | None = None
    """The verdict's own, before shaping."""
    note: str = ""
    """The verifier's explanation."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """The verdict's own numbers."""
    token_rewards: tuple[tuple[int, float], ...] = ()
    """(response token, reward) of what was earned on the way; `reward` stands on the last token."""

    @property
    def is_correct(self) -> bool:
        """The verdict, independent of the reward."""
        return self.status == "correct"

    @property
    def earned(self) -> float:
        """The sum of token_rewards."""
        return sum(reward for _, reward in self.token_rewards)

    @property
    def total_reward(self) -> float:
        """The sum of all."""
        return self.reward + self.earned

    def without_routes(self) -> ScoredRollout:
        """Return it without the rollout's routes, which are many bytes."""
        return dataclasses.replace(self, rollout=dataclasses.replace(self.rollout, routes=None))

    @property
    def own_columns(self) -> tuple[str, ...]:
        """Names in SAMPLED of what it has beside log-probabilities."""
        return (
            *self.rollout.columns,
            *["places"] * bool(self.rollout.inserted),
            *["token_rewards"] * bool(self.token_rewards),
            *["turn_starts"] * (len(self.rollout.turns) > 1),
        )

    def column(self, name: str) -> np.ndarray:
        """Return [T] numbers by their name in SAMPLED; zeros where it has none of these.

        There are no zeros for log-probabilities: sampled responses have them, and of given ones
        none are asked for.
        """
        r, dtype = self.rollout, PER_TOKEN[SAMPLED[name]].dtype
        if name == "places":
            return r.places
        if name in ("logprobs", *r.columns):
            found = r.logprobs if name == "logprobs" else r.columns[name]
            assert found is not None, "nothing has sampled a given response"
            return np.array(found, dtype)
        numbers = np.zeros(len(r.token_ids), dtype)
        if name == "turn_starts" and r.turns:
            numbers[[0, *(turn.end for turn in r.turns[:-1])]] = 1
        if name == "token_rewards":
            for token, reward in self.token_rewards:
                numbers[token] += reward
        return numbers
