"""Special tokens that a tokenizer adds: one begin token at most, and nothing after the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.errors import ConfigError

_TEXTS = ("1 + 1 = ", "2")
"""Two texts: what a tokenizer adds around both are its special tokens."""


def check_nothing_behind(hf_path: str | Path, tokenizer: Any) -> None:
    """Refuse a tokenizer that appends a token: the policy would answer behind the end of its text.

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
                f"model.hf_path={hf_path}: its tokenizer appends {names!r} to every text, behind "
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
