"""The report's responses with their verdicts and tokens.

The HTML holds the escaped text; the page's script shades it by the tokens' numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vapo_megatron.run.directory import Run
from vapo_megatron.run.report.html import escape, spread, visible

_MAX_CHARACTERS = 8000
_MAX_STEPS = 12
_MAX_TOKENS = 120_000
"""Of the whole page; all responses have equal shares."""
_STATUSES = ("correct", "wrong", "unparsable", "timed_out", "failed")


def rollouts(run: Run) -> tuple[str, list[dict[str, Any] | None]]:
    """Return the kept groups of up to 12 steps, from the first to the last, as HTML.

    Also the tokens of each response in the order of the page; None: not recorded.
    """
    parts: list[str] = []
    responses: list[Mapping[str, Any]] = []
    for step in spread(run.rollout_steps, _MAX_STEPS):
        groups = ""
        for group in run.rollouts(step):
            groups += _group(group, len(responses))
            responses += group["responses"]
        parts.append(
            f'<section class="step" data-step="{step}"><h3>Step {step}</h3>{groups}</section>'
        )
    tokens = [_tokens(r.get("tokens"), r, _MAX_TOKENS // len(responses)) for r in responses]
    return "".join(parts) or '<p class="empty">No responses were kept.</p>', tokens


def _tokens(
    known: Mapping[str, Sequence[Any]] | None, response: Mapping[str, Any], most: int
) -> dict[str, Any] | None:
    """Return both ends of the kept tokens, at most `most`; `gap`: [where, how many] are not."""
    if known is None:
        return None
    columns = {n: known[n] for n in ("values", "advantages", "entropy") if n in known}
    columns["pieces"] = [visible(piece) for piece in known["pieces"]]
    held = len(columns["pieces"])
    half = min(held, most) // 2
    if held == response["num_tokens"] and held <= most:
        return columns | {"gap": None}
    ends = {name: [*kept[:half], *kept[held - half :]] for name, kept in columns.items()}
    return ends | {"gap": [half, response["num_tokens"] - 2 * half]}


def _group(group: Mapping[str, Any], number: int) -> str:
    """The group's first response is the page's response `number`."""
    responses = group["responses"]
    correct = sum(r["status"] == "correct" for r in responses)
    marks = "".join(f'<i class="{_status(r)}" title="{_status(r)}"></i>' for r in responses)
    inside = "".join(_response(r, n) for n, r in enumerate(responses, number))
    return (
        f'<details class="group"><summary><span class="prompt">{escape(_preview(group["prompt"]))}'
        f'</span><span class="marks">{marks}</span>'
        f'<span class="count">{correct}/{len(responses)}</span></summary>'
        f'<div class="inside"><div class="caption">Prompt{_origin(group)}</div>'
        f"<pre>{_long(group['prompt'])}</pre>"
        f'<div class="caption">Answer</div><pre>{_long(group["answer"])}</pre>'
        f'<div class="caption">Responses</div>{inside}</div></details>'
    )


def _origin(group: Mapping[str, Any]) -> str:
    """The group's source and verifier, where the data name them."""
    source, verifier = group.get("source"), group.get("verifier")
    return (f" of {escape(source)}" if source else "") + (
        f", judged by {escape(verifier)}" if verifier else ""
    )


def _response(response: Mapping[str, Any], number: int) -> str:
    status = _status(response)
    truncated = '<span class="truncated">truncated</span>' if response["truncated"] else ""
    return (
        f'<details class="response {status}"><summary>'
        f'<span class="status">{status.replace("_", " ")}</span>'
        f'<span class="reward">{response["reward"]:+.2f}</span>'
        f'<span class="length">{response["num_tokens"]:,} tokens</span>{truncated}'
        f'<span class="preview">{escape(_preview(response["text"]))}</span></summary>'
        f'<pre data-response="{number}">{_long(response["text"])}</pre></details>'
    )


def _status(response: Mapping[str, Any]) -> str:
    return response["status"] if response["status"] in _STATUSES else "wrong"


def _preview(text: str) -> str:
    return visible(" ".join(text[:400].split()))[:200]


def _long(text: str) -> str:
    """Escape a text; a very long one is truncated in the middle."""
    text = visible(text)
    left_out = len(text) - _MAX_CHARACTERS
    if left_out <= 0:
        return escape(text)
    half = _MAX_CHARACTERS // 2
    note = f"<span class='gap'>{left_out:,} characters left out; see rollouts/</span>"
    return escape(text[:half]) + note + escape(text[-half:])
