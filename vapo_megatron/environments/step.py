"""What an environment says of an action.

An environment of your own is a class with two methods and no base class:

    class GuessTheNumber:
        def __init__(self, highest: int = 100) -> None:  # the options
            self.highest = highest

        def reset(self, problem, seed):
            self.number = random.Random(seed).randint(1, self.highest)
            return None  # or what follows the prompt

        def step(self, action: str) -> Step:
            guess = int(action.split()[-1])
            if guess == self.number:
                return Step(reward=1.0, done=True, verdict=True)
            return Step("too low" if guess < self.number else "too high")

`reset` is given the row's problem and a seed that is the same whenever the episode is sampled
again; it returns text, messages, or None. `close`, if there is one, is called at the end.
`schemas`, if there is one, returns the JSON schemas of tools, a list of dicts, for the chat
template; it is asked once, of an object that plays no episode.
The class is loaded once, in a process from which each episode's own is forked: threads, a GPU and
connections are to be started by the object, not on import.
Imports no torch, so that an environment's process starts quickly.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from vapo_megatron.reward.functions import WrongReturn, as_verdict
from vapo_megatron.reward.verifier import Verdict, is_finite, python_value

Observation = str | list[dict[str, str]]

CUT = " [cut]"
"""What a text ends with that was too long."""
MAX_NOTE_CHARACTERS = 1000
MAX_MESSAGES = 100
MAX_FAILED_CALLS = 1 << 20
_DUE, _MORE = ("role", "content"), ("name", "tool_call_id")
"""Of a message."""
_TEXT_OR_MESSAGES = "text, or a list of messages like {'role': 'user', 'content': text}"
_REPR = reprlib.Repr()
_REPR.maxother = _REPR.maxstring = 100


@dataclasses.dataclass(frozen=True)
class Step:
    """An environment's answer to one action; `checked` has the rules."""

    observation: str | Sequence[Mapping[str, str]] = ""
    """What the policy sees next: text, or messages for the chat template, each with the texts
    role and content, and perhaps name and tool_call_id."""
    reward: float = 0.0
    """The action's own, a finite number."""
    done: bool = False
    """The episode ends here; the observation is then seen by nobody."""
    verdict: bool | float | Verdict | None = None
    """On the whole episode, as a function that is a verifier returns it; None: none."""
    note: str = ""
    """A short explanation for people."""
    failed_calls: int = 0
    """Calls of tools in this action that were wrong; a metric counts them."""


def seed_of(problem: Any, seed: int) -> int:
    """Return the row's own seed where it has a whole number in a column `seed`, else the episode's.

    With one, all responses to a prompt begin alike: what a group's mean is taken over.
    """
    own = problem.metadata.get("seed")
    return own if isinstance(own, int) and not isinstance(own, bool) else seed


def checked(step: Any, max_characters: int, full_score: float | None) -> Step:
    """Return a step whose fields are exactly a text or list of dicts, a float, a bool, a Verdict
    or None, a text, and an int.

    Scalars of numpy and torch become Python's; texts are cut at their limit, and half a surrogate
    pair becomes a question mark. Nothing else is mended.

    Args:
        step: what was returned.
        max_characters: of an observation, all its messages together, and of a verdict's answer.
        full_score: the least score that is correct; None: scores are refused.

    Raises:
        WrongReturn: it is no Step, or a field is not what it must be; the message says which.
    """
    if not isinstance(step, Step):
        raise WrongReturn(f"step returned {_shown(step)}, not a Step")
    reward, done = python_value(step.reward), python_value(step.done)
    if not (is_finite(reward) or isinstance(reward, bool)):
        raise WrongReturn(f"step's reward={_shown(step.reward)} must be a finite number")
    if not isinstance(done, bool):
        raise WrongReturn(f"step's done={_shown(step.done)} must be True or False")
    if not isinstance(step.note, str):
        raise WrongReturn(f"step's note={_shown(step.note)} must be text")
    calls = python_value(step.failed_calls)
    if isinstance(calls, bool) or not isinstance(calls, int) or not 0 <= calls <= MAX_FAILED_CALLS:
        raise WrongReturn(
            f"step's failed_calls={_shown(step.failed_calls)} must be a whole number from 0 to "
            f"{MAX_FAILED_CALLS}"
        )
    return Step(
        checked_observation("step's observation", step.observation, max_characters),
        float(reward),
        done,
        _checked_verdict(step.verdict, max_characters, full_score),
        text(step.note, MAX_NOTE_CHARACTERS),
        int(calls),
    )


def checked_observation(name: str, value: Any, max_characters: int) -> Observation:
    """Return the texts of an observation, as `checked` has them; name: in messages."""
    if isinstance(value, str):
        return text(value, max_characters)
    if not isinstance(value, list | tuple):
        raise WrongReturn(f"{name}={_shown(value)} must be {_TEXT_OR_MESSAGES}")
    if len(value) > MAX_MESSAGES:
        raise WrongReturn(f"{name} has {len(value)} messages, more than {MAX_MESSAGES}")
    left = max_characters
    found = []
    for message in value:
        is_message = isinstance(message, Mapping) and set(_DUE) <= set(message) <= {*_DUE, *_MORE}
        if not is_message or not all(isinstance(part, str) for part in message.values()):
            raise WrongReturn(f"{name} has {_shown(message)}; it must be {_TEXT_OR_MESSAGES}")
        parts = {key: text(part, MAX_NOTE_CHARACTERS) for key, part in message.items()}
        parts["content"] = text(message["content"], left)
        left = max(left - len(parts["content"]), 0)
        found.append(parts)
    return found


def text(value: str, max_characters: int) -> str:
    """Return a text that can be encoded and is not too long: what is cut ends with CUT."""
    whole = str.__str__(value)  # Not what a subclass makes of itself.
    if len(whole) > max_characters:
        whole = whole[: max(max_characters - len(CUT), 0)] + CUT
    return whole.encode("utf-8", "replace").decode()


def _checked_verdict(value: Any, max_characters: int, full_score: float | None) -> Verdict | None:
    if value is None:
        return None
    try:
        verdict = as_verdict(value, full_score)
        answer = None if verdict.answer is None else text(verdict.answer, max_characters)
        note = text(verdict.note, MAX_NOTE_CHARACTERS)
        return Verdict(verdict.status, verdict.score, answer, note, dict(verdict.metrics))
    except WrongReturn as wrong:
        raise WrongReturn(f"step's verdict: {wrong}") from None
    except (TypeError, ValueError) as error:  # Something has changed its fields.
        raise WrongReturn(f"step's verdict: {error}") from None


def _shown(value: Any) -> str:
    """Return an excerpt of a value's repr, whatever that is."""
    return _REPR.repr(value)[:200]
