"""Warnings about prompts and stop tokens that are valid but probably mistakes."""

from __future__ import annotations

from vapo_megatron.errors import tell
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.special_tokens import chat_marks, end_of_turn, has_mark


def tell_warnings(inputs: Inputs) -> None:
    """Print input_warnings on standard error."""
    for line in input_warnings(inputs):
        tell(f"warning: {line}")


def input_warnings(inputs: Inputs) -> list[str]:
    """Return warnings about what was read; empty for a replay, which reads no prompts."""
    datasets = [d for d in (inputs.dataset, inputs.held_out) if d is not None]
    lines = [
        f"{d.path}: {d.num_double_begin} prompts of {len(d)} start with the begin token, which the "
        "tokenizer adds too; the second is left out"
        for d in datasets
        if d.num_double_begin
    ]
    texts = (row.prompt for dataset in datasets for row in dataset.rows)
    turn = inputs.tokenizer and end_of_turn(inputs.tokenizer)
    stops = inputs.stop_token_ids
    marks = chat_marks(inputs.tokenizer) if turn and turn[1] not in stops else []
    if turn and marks and any(has_mark(text, marks) for text in texts):
        token, token_id = turn
        fixed = ",".join(map(str, sorted({*stops, token_id})))
        lines.append(
            f"the chat template ends a turn with {token} ({token_id}), which is no stop token "
            f"(they are {', '.join(map(str, stops))}): responses would go on behind it, up to the "
            f"length limit; set rollout.stop_token_ids=[{fixed}]"
        )
        stops = (*stops, token_id)  # Is told of once.
    end = getattr(inputs.tokenizer, "eos_token_id", None)
    if stops and end is not None and end not in stops:
        kept = ",".join(map(str, sorted({*stops, end})))
        lines.append(
            f"the tokenizer's end of a sequence, {inputs.tokenizer.convert_ids_to_tokens(end)} "
            f"({end}), is no stop token (they are {', '.join(map(str, stops))}): responses that "
            f"end with it would go on behind it; if yours do, set rollout.stop_token_ids=[{kept}]"
        )
    return lines
