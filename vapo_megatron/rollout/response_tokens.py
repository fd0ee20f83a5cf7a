"""Token ids of the responses that a data file gives."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from vapo_megatron.data.problems import Problem
from vapo_megatron.errors import ConfigError, DataError
from vapo_megatron.rollout.special_tokens import chat_marks, end_of_turn, has_mark


class ResponseTokens:
    """Makes token ids of a problem's response: a list as it is, a text with a stop token behind it.

    A text is encoded without special tokens. What stops it is what the policy is to end with: where
    the prompt is a chat the token that the template ends a turn with, else the tokenizer's end of a
    text. A text that ends with it already gets no second one.
    """

    def __init__(
        self, tokenizer: Any, stop_token_ids: Sequence[int], *, vocab_size: int, max_tokens: int
    ) -> None:
        """Find the stop tokens.

        Args:
            tokenizer: transformers'.
            stop_token_ids: of the run.
            vocab_size: of the model.
            max_tokens: rollout.max_response_tokens.
        """
        self._tokenizer, self._stops = tokenizer, stop_token_ids
        self._vocab_size, self._max_tokens = vocab_size, max_tokens
        self._marks, self._turn = chat_marks(tokenizer), end_of_turn(tokenizer)

    def __call__(self, problem: Problem) -> array[int]:
        """Return int32 ids, the stop token included.

        Raises:
            DataError: it has no tokens, too many, or ids that the model does not have.
            ConfigError: no stop token is known.
        """
        response = problem.response
        assert response is not None, "load_problems has refused a row without one"
        if isinstance(response, str):
            ids = array("i", self._tokenizer.encode(response, add_special_tokens=False))
            if not ids:
                raise DataError(f"its response has no tokens: {response!r:.60}; remove it")
            stop = self._stop(problem.prompt)
            ids = ids if ids[-1] == stop else ids + array("i", [stop])
        else:
            ids = response
        if not 0 <= min(ids) <= max(ids) < self._vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self._vocab_size)
            raise DataError(
                f"its response has token id {wrong}, outside the model's vocabulary of "
                f"{self._vocab_size}; give ids of model.hf_path's tokenizer"
            )
        if len(ids) > self._max_tokens:
            raise DataError(
                f"its response has {len(ids)} tokens, more than rollout.max_response_tokens="
                f"{self._max_tokens}; raise the limit or remove the problem"
            )
        return ids

    def _stop(self, prompt: str) -> int:
        if self._turn is not None and has_mark(prompt, self._marks):
            return self._turn[1]
        eos, stops = self._tokenizer.eos_token_id, self._stops
        if eos in stops or len(stops) == 1:
            return int(eos if eos in stops else stops[0])
        raise ConfigError(
            f"of the stop tokens {', '.join(map(str, stops))} none is the tokenizer's end of a "
            "text, so which of them ends a response that is a text is not known; set "
            "rollout.stop_token_ids to one, or give responses as token ids"
        )
