"""The report's responses with their verdicts and tokens.

The HTML holds the escaped text; the page's script shades it by the tokens' numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from vapo_megatron.run.directory import Run
from vapo_megatron.run.report.html import escape, spread, visible

_MAX_CHARACTERS = 8000
_MAX_SHOWN_TURNS = 64
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
    return _ends(known, response, most) | _turns(response)


def _turns(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return where an episode's turns end, their rewards, and what was observed after each."""
    turns = _shown_turns(response)
    if not turns:
        return {}
    observed = [_shortened(turn["observation"], _most_of(turns)) for turn in turns]
    return {
        "turns": [[t["end"], t["reward"], *parts] for t, parts in zip(turns, observed, strict=True)]
    }


def _ends(
    known: Mapping[str, Sequence[Any]], response: Mapping[str, Any], most: int
) -> dict[str, Any]:
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
    prompt = group["prompt"]
    inside = "".join(_response(r, n, prompt) for n, r in enumerate(responses, number))
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


def _response(response: Mapping[str, Any], number: int, prompt: str) -> str:
    status = _status(response)
    cut = f"cut by {response['cut_by']}" if response.get("cut_by") else "truncated"
    truncated = f'<span class="truncated">{escape(cut)}</span>' if response["truncated"] else ""
    turns = f" in {len(response['turns'])} turns" if response.get("turns") else ""
    note = response.get("note", "")
    noted = f'<div class="caption">{_long(note)}</div>' if note else ""
    return (
        f'<details class="response {status}"><summary>'
        f'<span class="status">{status.replace("_", " ")}</span>'
        f'<span class="reward">{response["reward"]:+.2f}</span>'
        f'<span class="length">{response["num_tokens"]:,} tokens{turns}</span>{truncated}'
        f'<span class="preview">{escape(_preview(response["text"]))}</span></summary>'
        f'{noted}{_begun(response, prompt)}<pre data-response="{number}">{_text(response)}</pre>'
        "</details>"
    )


def _text(response: Mapping[str, Any]) -> str:
    """A response's text; an episode's actions, each with its reward and what was observed."""
    turns = response.get("turns")
    if not turns:
        return _long(response["text"])
    shown = _shown_turns(response)
    most, parts = _most_of(shown), []
    for number, turn in enumerate(shown, 1):
        parts.append(_long(turn["action"], most))
        parts.append(f'<span class="turn">turn {number}, reward {turn["reward"]:+g}</span>')
        if turn["observation"]:
            parts.append(f'<span class="observation">{_long(turn["observation"], most)}</span>')
    if left_out := len(turns) - len(shown):
        parts.append(f'<span class="gap">{left_out} turns left out; see rollouts/</span>')
    return "".join(parts)


def _begun(response: Mapping[str, Any], prompt: str) -> str:
    """What an environment has said before any action: where the prompt goes on otherwise."""
    begin = response.get("begin", "")
    rest = begin[len(os.path.commonprefix([begin, prompt])) :]
    return f'<pre class="observation">{_long(rest)}</pre>' if rest else ""


def _shown_turns(response: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    turns: Sequence[Mapping[str, Any]] = response.get("turns", ())
    return turns[:_MAX_SHOWN_TURNS]


def _most_of(turns: Sequence[Any]) -> int:
    """Characters of each action and observation, all of which have the share of a response."""
    return _MAX_CHARACTERS // (2 * len(turns))


def _status(response: Mapping[str, Any]) -> str:
    return response["status"] if response["status"] in _STATUSES else "wrong"


def _preview(text: str) -> str:
    return visible(" ".join(text[:400].split()))[:200]


def _long(text: str, most: int = _MAX_CHARACTERS) -> str:
    """Escape a text; a very long one is truncated in the middle."""
    first, *rest = _shortened(text, most)
    if not rest:
        return escape(first)
    left_out, last = rest
    note = f"<span class='gap'>{left_out:,} characters left out; see rollouts/</span>"
    return escape(first) + note + escape(last)


def _shortened(text: str, most: int = _MAX_CHARACTERS) -> list[Any]:
    """Return [text], or [its beginning, characters left out, its end] of a longer one."""
    text = visible(text)
    left_out, half = len(text) - most, most // 2
    return [text] if left_out <= 0 else [text[:half], len(text) - 2 * half, text[-half:]]
