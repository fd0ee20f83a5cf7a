"""The tokens that stand between two actions of an episode, found from the chat template itself.

History is never rendered again: a template may strip thoughts or space calls anew, and the policy
would be trained on tokens that it never sampled. The tail is what the template writes after an
assistant's message:

    [user, assistant(MARK), new messages] with a generation prompt, behind MARK

It begins with the token that ends a turn, which the policy has sampled; the rest is encoded. As it
follows a special token, no merge of the tokenizer crosses its beginning.

Text of an environment never becomes a token that the tokenizer does not make of plain text: a tool
could otherwise end a turn, or forge one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vapo_megatron.data.chat import Message
from vapo_megatron.errors import ConfigError, DataError
from vapo_megatron.rollout.tokenizer import ChatTemplate

Said = str | Sequence[Message]
"""What an environment says: a text, which is a user's message where there is a template."""

_MARKS = ("4 and 5.", "A longer one: 17 times.")
_HISTORIES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "How many?"}],
    [
        {"role": "user", "content": "Begin."},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Go on."},
    ],
)
_SOMETHING = "Something else."
_NONE: Mapping[str, Any] = {}


class TurnTokens:
    """Encodes what an environment says, for one tokenizer.

    Args:
        tokenizer: transformers'.
        stop_token_ids: those that end a response.
        date: see ChatTemplate.

    Raises:
        ConfigError: the template's tail depends on what stands before it, or does not begin with a
            stop token.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int], date: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, date) if tokenizer.chat_template else None
        added = [token for token in tokenizer.get_added_vocab() if not token.isspace()]
        added.sort(key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        self._stops = tokenizer.convert_ids_to_tokens(list(stop_token_ids))
        self.end_of_turn = stop_token_ids[0]
        """The stop token that the template writes behind an assistant's message."""
        if self._template is not None:
            self._check()

    def after_action(self, said: Said, variables: Mapping[str, Any] = _NONE) -> list[int]:
        """Return the tokens that follow an action, up to where the next one begins.

        Args:
            said: by the environment.
            variables: of the template, as the row's prompt was written with: the next generation
                prompt is then as the first, such as with or without thinking.

        Raises:
            DataError: the template refuses the messages or does not write one of them, or there is
                none for them.
        """
        if self._template is None:
            return self._encoded(self._plain(said))

        def written(messages: Sequence[Message]) -> str:
            return self._tail(_HISTORIES[0], _MARKS[0], messages, variables)

        end, *ids = self._encoded(_with_all(self._messages(said), written))
        if end != self.end_of_turn:
            raise DataError("before these messages the chat template ends the turn with other text")
        return ids

    def after_prompt(
        self, prompt_ids: Sequence[int], said: Said, variables: Mapping[str, Any] = _NONE
    ) -> list[int]:
        """Return a prompt with what an environment says at an episode's beginning.

        With a template it stands before the generation prompt, with which the prompt must end.

        Raises:
            DataError: the prompt does not, or as after_action.
        """
        prompt = list(prompt_ids)
        if not said:
            return prompt
        if self._template is None:
            return prompt + self._encoded(self._plain(said))
        begun: list[Message] = [{"role": "user", "content": _MARKS[0]}]

        def written(messages: Sequence[Message]) -> str:
            return self._written([*begun, *messages], variables)

        before = self._written(begun, variables, is_prompt=False)
        prompted = written([])
        all_of_it = _with_all(self._messages(said), written)
        opening = self._encoded(prompted.removeprefix(before))
        if prompt[len(prompt) - len(opening) :] != opening or not all_of_it.startswith(before):
            raise DataError(
                "a prompt does not end with the chat template's generation prompt, before which "
                "the environment's first message belongs"
            )
        return prompt[: len(prompt) - len(opening)] + self._encoded(all_of_it[len(before) :])

    def _check(self) -> None:
        """Try the template, with a user's message and with a tool's. Raises ConfigError."""
        for role in ("user", "tool"):
            try:
                tails = {
                    self._tail(history, mark, [{"role": role, "content": _SOMETHING}])
                    for history in _HISTORIES
                    for mark in _MARKS
                }
            except DataError:
                if role == "tool":  # Many templates have none; an observation in it will say so.
                    continue
                raise ConfigError(
                    "the tokenizer's chat template writes no conversation that goes on after an "
                    "assistant's message, as episodes need; give another chat_template"
                ) from None
            if len(tails) > 1:
                raise ConfigError(
                    f"the tokenizer's chat template writes a {role}'s message differently after "
                    "other messages, so that an episode's tokens would not be those of its text; "
                    "give another chat_template, or take it away for plain text"
                )
            (tail,) = tails
            if not tail.startswith(tuple(self._stops)):
                raise ConfigError(
                    f"behind an assistant's message the tokenizer's chat template writes "
                    f"{tail[:20]!r}, which begins with no stop token ({', '.join(self._stops)}); "
                    "add the token that ends a turn to rollout.stop_token_ids"
                )
            (self.end_of_turn, *_) = self._encoded(tail)

    def _tail(
        self,
        history: Sequence[Message],
        mark: str,
        messages: Sequence[Message],
        variables: Mapping[str, Any] = _NONE,
    ) -> str:
        """Return the text behind an assistant's message, the end of its turn included."""
        answered = [*history, {"role": "assistant", "content": mark}, *messages]
        text = self._written(answered, variables)
        _, found, tail = text.partition(mark)
        if not found or not tail:
            raise DataError("the tokenizer's chat template does not write an assistant's message")
        return tail

    def _written(
        self, messages: Sequence[Message], variables: Mapping[str, Any], is_prompt: bool = True
    ) -> str:
        assert self._template is not None
        kept = [self._kept_apart(message) for message in messages]
        return self._template.written(kept, add_generation_prompt=is_prompt, **variables)

    def _messages(self, said: Said) -> list[Message]:
        return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)

    def _plain(self, said: Said) -> str:
        if not isinstance(said, str):
            raise DataError(
                "the environment says messages, and the tokenizer has no chat template for them; "
                "return a text"
            )
        return self._kept_apart({"content": said})["content"]

    def _kept_apart(self, message: Message) -> Message:
        """Return a message in whose text no added token is whole; see _encoded."""
        if self._added is None:
            return message
        text = message["content"].replace(_APART, "")
        apart = self._added.sub(lambda token: f"{token[0][0]}{_APART}{token[0][1:]}", text)
        return {**message, "content": apart}

    def _encoded(self, text: str) -> list[int]:
        """Encode a text part by part, so that what was kept apart stays so."""
        encode = self._tokenizer.encode
        return [i for part in text.split(_APART) for i in encode(part, add_special_tokens=False)]


def _with_all(messages: list[Message], written: Callable[[Sequence[Message]], str]) -> str:
    """Return the text of some messages. DataError: it is the same whatever one of them says."""
    text = written(messages)
    for i, message in enumerate(messages):
        other = {**message, "content": f"{message['content']} 1"}
        if written([*messages[:i], other, *messages[i + 1 :]]) == text:
            raise DataError(
                f"the tokenizer's chat template does not write a message of role {message['role']}"
            )
    return text


_APART = "\ue000"
"""A character for private use."""
