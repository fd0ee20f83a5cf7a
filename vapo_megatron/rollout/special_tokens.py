"""Special tokens: what a tokenizer adds to a text, and what a chat template writes around turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.errors import ConfigError

_SAID = "1 + 1"
_TEXTS = ("1 + 1 = ", "2")
"""Two texts: what a tokenizer adds around both are its special tokens."""


def check_nothing_behind(hf_path: str | Path, tokenizer: Any, field: str) -> None:
    """Refuse a tokenizer that appends a token: the policy would answer behind the end of its text.

    Args:
        hf_path, tokenizer: directory, and what was loaded from it.
        field: or option that gave the directory, for messages.

    Raises:
        ConfigError: names the tokens.
    """
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    for text in _TEXTS:
        bare = tokenizer.encode(text, add_special_tokens=False)
        behind = _behind(bare, tokenizer.encode(text)) or [i for i in bare[-1:] if i in special]
        if behind:
            names = " ".join(tokenizer.convert_ids_to_tokens(behind))
            raise ConfigError(
                f"{field}={hf_path}: its tokenizer appends {names!r} to every text, behind "
                "which no response belongs; remove it from post_processor in tokenizer.json, and "
                "set add_eos_token to false in tokenizer_config.json"
            )


def _behind(bare: Sequence[int], encoded: Sequence[int]) -> Sequence[int]:
    """Return what follows a text's own tokens."""
    size = len(bare)
    starts = (i for i in range(len(encoded) - size + 1) if encoded[i : i + size] == bare)
    start = next(starts, None) if size else None
    return () if start is None else encoded[start + size :]


def begin_of(tokenizer: Any) -> list[int]:
    """Return what prompts begin with: what encoding adds, else the begin token; may be empty."""
    added: list[int] = tokenizer.encode("")
    return added or [i for i in (tokenizer.bos_token_id,) if i is not None]


def end_of_turn(tokenizer: Any) -> tuple[str, int] | None:
    """Return the special token, and its id, that a chat template ends an assistant's turn with.

    None: there is no template, or it ends a turn with other text.
    """
    turns = [{"role": "user", "content": _SAID}, {"role": "assistant", "content": "two"}]
    written = _written(tokenizer, turns, is_asked=False)
    behind = written.rpartition("two")[2] if "two" in written else ""
    found = [(behind.find(token), token) for token in _added_tokens(tokenizer) if token in behind]
    if not found:
        return None
    # Of two at one place the longer is what the tokenizer makes of it.
    _, token = min(found, key=lambda item: (item[0], -len(item[1])))
    return token, tokenizer.convert_tokens_to_ids(token)


def chat_marks(tokenizer: Any) -> list[str]:
    """Return what a chat template writes around a user's message; empty without a template."""
    written = _written(tokenizer, [{"role": "user", "content": _SAID}], is_asked=True)
    begin = tokenizer.bos_token
    marks = [t for t in _added_tokens(tokenizer) if t in written and t != begin]
    return marks or [part for part in [written.rpartition(_SAID)[2].strip()] if part]


def has_mark(text: str, marks: Sequence[str]) -> bool:
    """Return whether a prompt is a chat, by chat_marks."""
    return any(mark in text for mark in marks)


def _written(tokenizer: Any, messages: Sequence[Any], *, is_asked: bool) -> str:
    """Return what the template makes of messages; empty: there is none, or it refuses them."""
    if not tokenizer.chat_template:
        return ""
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_asked)
        )
    except Exception:  # jinja2's, and whatever a template's calls raise.
        return ""


def _added_tokens(tokenizer: Any) -> list[str]:
    """Return the texts of special tokens and others that are never split, but not spaces."""
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return [token for token in tokens if token.strip()]
