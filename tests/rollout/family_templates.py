"""Chat templates in the forms of published families, and byte-level tokenizers for them.

The tokenizers have the families' special tokens, and a few merges in place of published ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN3 = """
{%- set last = namespace(user=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- set before = messages[loop.index0 - 1].role if loop.index0 else '' -%}
{%- set after = '' if loop.last else messages[loop.index0 + 1].role -%}
{%- if m.role == 'tool' -%}
{{ '' if before == 'tool' else '<|im_start|>user' }}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{{- '' if after == 'tool' else '<|im_end|>\n' -}}
{%- else -%}
{%- set said = m.content -%}
{%- if m.role == 'assistant' and loop.index0 < last.user -%}
{%- set said = said.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{ '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{{- '' if enable_thinking | default(true) else '<think>\n\n</think>\n\n' }}
{%- endif -%}
"""
"""Thoughts before the last question are left out, tools' answers stand together."""
LLAMA3 = """
{{- bos_token -}}
{%- for m in messages -%}
{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}
{{- (m.content | tojson if m.role == 'tool' else m.content | trim) + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif -%}
"""
"""Texts are trimmed, and a tool's answer is JSON."""


class Family(NamedTuple):
    template: str
    special: tuple[str, ...]
    """Tokens that decoding leaves out; the first begins or ends a text."""
    plain: tuple[str, ...]
    """Added tokens that are not special."""
    end: str
    """Of a turn."""


FAMILIES = {
    "Qwen3": Family(
        QWEN3,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        (
            "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
            "</tool_response>",
        ),
        "<|im_end|>",
    ),
    "Llama 3": Family(
        LLAMA3,
        (
            "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
            "<|eot_id|>", "<|eom_id|>",
        ),
        (),
        "<|eot_id|>",
    ),
}  # fmt: skip
_MERGES = (("Ċ", "Ċ"), ("u", "s"), ("us", "e"), ("use", "r"), (".", "Ċ"), ("?", "Ċ"), ("Ġ", "t"))


def family_tokenizer(family: Family) -> Any:
    """transformers' tokenizer. Its merges join newlines with what stands beside them."""
    tokens = {"bos_token": family.special[0], "eos_token": family.end}
    return byte_level(family.special, family.plain, family.template, _MERGES, **tokens)


def byte_level(
    special: Sequence[str],
    plain: Sequence[str],
    template: str,
    merges: Sequence[tuple[str, str]] = (),
    **more: Any,
) -> Any:
    """transformers' tokenizer of bytes, of merges, and of special tokens and others of one piece.

    more: of transformers.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*special, *alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, additional_special_tokens=list(special), chat_template=template,
        **more,
    )  # fmt: skip
    tokenizer.add_tokens(list(plain))
    return tokenizer
