r"""Revises reasoning traces after the fact: Retro-Search (arXiv 2504.04383), without an engine.

A trace is a right response. Blank lines divide it into steps, and a step that begins with a
transition keyword ("Wait", "But", ...) switches to a new thought. At each switch other endings are
sampled that continue the thought before it; one that is right in fewer steps replaces the rest:

    for s in the switches of T, in order:           # from behind the last one that was tried
        endings  sampled from T[:s], without a keyword at the beginning of their first step
        best     of the highest value, gamma^(steps left) if right, else 0
        if value(best) > value(T[s:]):  T = T[:s] + best, and the switches are those of the new T

`Revision` does this for many traces at once, so that an engine samples one batch for the current
switch of every trace; the caller samples and judges. The definitions of steps and thoughts, and
which rollouts are tried, are the paper's section 2. KEYWORDS and gamma 0.9 are recalled from its
appendix, which could not be read again: both are options. That a switch may neither stand in a code
block or a displayed formula nor be the trace's first step, which has no thought before it, is this
package's rule.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vapo_megatron.errors import ConfigError

KEYWORDS = (
    "But", "Wait", "Alternatively", "However", "Hmm", "Hmmm", "Not sure", "Going back",
    "Backtrack", "Trace back", "Another",
)  # fmt: skip
BLANK_LINES = r"\n(?:[ \t\r]*\n)+"
"""What separates two steps, as a regular expression."""

Decode = Callable[[Sequence[int]], str]
"""Token ids of a trace, or of its beginning, to text."""

# As in Markdown, a code block that is never closed ends with the text; a formula must be closed.
_WHOLE = re.compile(
    r"^[ \t]*(?P<fence>`{3,}(?=[^`\n]*$)|~{3,}).*?(?:^[ \t]*(?P=fence)[`~]*[ \t]*$|\Z)"
    r"|\$\$.*?\$\$|\\\[.*?\\\]|\\begin\{(?P<name>\w+\*?)\}.*?\\end\{(?P=name)\}",
    re.DOTALL | re.MULTILINE,
)
_NO_VERDICT = (None, "pending", "failed", "timed_out")
"""Statuses in a file of samples that say neither right nor wrong."""
_SPLIT_CHARACTER = 4
"""The most tokens that the bytes of one character may be divided among."""


class Settings(NamedTuple):
    """How traces are divided and endings compared."""

    keywords: tuple[str, ...] = KEYWORDS
    """A step that begins with one of them, as a whole word in its own case, is a switch."""
    separator: str = BLANK_LINES
    """Of steps: a regular expression."""
    gamma: float = 0.9
    """Discount of a step; with 1 nothing is ever replaced."""
    max_switches: int | None = None
    """The budget: switches that are tried in one trace; None: all. Each costs the caller's number
    of endings. Without it a trace ends by itself after as many as it has steps, at most."""

    def check(self) -> None:
        """Raise ConfigError: a value is out of its range."""
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"--gamma={self.gamma:g} must be in (0, 1]; change it")
        if not self.keywords or not all(map(str.strip, self.keywords)):
            raise ConfigError(
                f"--keywords={','.join(self.keywords)} must be one word or more; change it"
            )
        if self.max_switches is not None and self.max_switches < 1:
            raise ConfigError(f"--max-switches={self.max_switches} must be at least 1; change it")
        try:
            matches_nothing = re.compile(self.separator).fullmatch("") is not None
        except re.error as error:
            raise ConfigError(
                f"--separator={self.separator} is no regular expression ({error}); correct it"
            ) from None
        if matches_nothing:
            raise ConfigError(f"--separator={self.separator} matches nothing at all; change it")


class Step(NamedTuple):
    """Where a step stands in its text, in characters."""

    begin: int
    end: int


def find_steps(text: str, separator: str = BLANK_LINES) -> list[Step]:
    """Return the steps of a text, in order; those of white space alone are none.

    A separator in a closed code block or displayed formula separates nothing.
    """
    whole = [match.span() for match in _WHOLE.finditer(text)]
    found, begin = [], 0
    for match in re.finditer(separator, text):
        while whole and whole[0][1] <= match.start():
            whole.pop(0)
        if not whole or match.start() < whole[0][0]:
            found.append(Step(begin, match.start()))
            begin = match.end()
    found.append(Step(begin, len(text)))
    return [step for step in found if text[step.begin : step.end].strip()]


def split_steps(text: str, separator: str = BLANK_LINES) -> list[str]:
    """Return the texts of find_steps."""
    return [text[step.begin : step.end] for step in find_steps(text, separator)]


def split_thoughts(
    text: str, keywords: Sequence[str] = KEYWORDS, separator: str = BLANK_LINES
) -> list[list[str]]:
    """Return a text's thoughts, each a list of its steps; a switch begins a new one."""
    thoughts: list[list[str]] = []
    for step in split_steps(text, separator):
        if not thoughts or is_switch(step, keywords):
            thoughts.append([])
        thoughts[-1].append(step)
    return thoughts


def is_switch(step: str, keywords: Sequence[str] = KEYWORDS) -> bool:
    """Return whether a step begins with a keyword: "Wait, no" does, "Waiting" and "So but" not."""
    return _beginning(tuple(keywords)).match(step) is not None


@functools.cache
def _beginning(keywords: tuple[str, ...]) -> re.Pattern[str]:
    # A keyword that ends in a letter ends its word; one such as "..." may have anything behind it.
    words = (re.escape(k) + (r"(?!\w)" if re.match(r"\w", k[-1]) else "") for k in keywords)
    return re.compile(rf"\s*(?:{'|'.join(words)})")


def value(steps_left: int, gamma: float, *, is_right: bool) -> float:
    """Return gamma^steps_left of a right ending, 0 of another."""
    return gamma**steps_left if is_right else 0.0


def banned_first_tokens(texts: Sequence[str], keywords: Sequence[str] = KEYWORDS) -> list[int]:
    """Return the ids of the tokens that begin a switch by themselves.

    These get no probability in the first token of an ending. A keyword of several tokens, such as
    "Not sure", has none here, since its first one ("Not", "Al") begins other words too: see
    begins_with_switch.

    Args:
        texts: [V] the decoded text of each id.
        keywords: of Settings.
    """
    return [token for token, text in enumerate(texts) if is_switch(text, keywords)]


def begins_with_switch(ending: str, settings: Settings) -> bool:
    """Return whether the first step of an ending, once it is finished, is a banned one."""
    first = split_steps(ending, settings.separator)[:1]
    return any(is_switch(step, settings.keywords) for step in first)


class Trace(NamedTuple):
    """A response that may be revised."""

    token_ids: Sequence[int]
    """Of the response alone, as they were sampled."""
    place: str
    """Names it in messages, such as "out.jsonl, problem 3, sample 1"."""
    noted: str | None
    """The status that it came with, see reward.verifier.Verdict; None: none."""
    status: str
    """The verifier's status of the same text today."""
    truncated: bool = False
    """Whether the length limit has ended it."""


class Ending(NamedTuple):
    """What was sampled after a prefix, and how the whole text, prefix included, was judged."""

    token_ids: Sequence[int]
    """Without the prefix."""
    status: str
    truncated: bool = False


class Asked(NamedTuple):
    """A prefix that wants endings."""

    trace: int
    """Index of the trace."""
    token_ids: list[int]
    """The trace's own, up to where its current switch begins."""


class Decision(NamedTuple):
    """What became of one switch."""

    trace: int
    switch_at_step: int
    """From 0, in the trace as it was then."""
    value_of_existing: float
    best: float
    """Value of the best ending; 0 where every one was wrong or dropped."""
    accepted: bool


@dataclasses.dataclass
class _Current:
    """A trace as it is now."""

    token_ids: list[int]
    text: str
    steps: list[Step]
    tried_to: int = 0
    """Character up to which switches have been tried, or begin the ending accepted last."""
    num_tried: int = 0
    switch: int = 0
    """The step that is tried now."""
    cut: int = 0
    """Tokens before it."""


class Revision:
    """Traces under revision: `ask`, sample and judge, `decide`, until `ask` has no prefix left.

        while asked := revision.ask():
            revision.decide([sample_and_judge(prefix.token_ids) for prefix in asked])

    The traces do not depend on each other. Only those that came with the status correct, and are
    judged so again, are revised.
    """

    def __init__(self, traces: Sequence[Trace], decode: Decode, settings: Settings) -> None:
        """Divide the traces.

        Args:
            traces: of any status.
            decode: the tokenizer's, such that the text of a beginning begins the text.
            settings: of the run.

        Raises:
            ConfigError: see Settings.check.
        """
        settings.check()
        self._decode, self._settings = decode, settings
        self.log: list[Decision] = []
        """Of every switch that was tried, in order; of a trace in the order of its text."""
        self.endings = Counter[str]()
        """Endings by what they were: banned (begins with a keyword, dropped), truncated (of value
        0), or their status."""
        self.untried = Counter[str]()
        """Switches that begin inside_token, where no prefix can end, and traces over_budget."""
        self.refusals: list[str] = []
        """Of traces that the verifier no longer calls correct: one line each."""
        self.left_out: dict[int, str] = {}
        """Index of a trace that is not revised -> no_verdict, wrong, truncated or refused."""
        self._traces: dict[int, _Current] = {}
        self._open: list[int] = []
        for index, trace in enumerate(traces):
            if reason := self._reason(trace):
                self.left_out[index] = reason
                continue
            text = decode(trace.token_ids)
            steps = find_steps(text, settings.separator)
            self._traces[index] = _Current(list(trace.token_ids), text, steps)
        self._had_switch = {i for i, t in self._traces.items() if any(self._switches(t))}
        self._open = [index for index in self._traces if self._advance(index)]

    def ask(self) -> list[Asked]:
        """Return the prefix of every trace that has a switch to try, in the traces' order."""
        current = [(index, self._traces[index]) for index in self._open]
        return [Asked(index, trace.token_ids[: trace.cut]) for index, trace in current]

    def decide(self, endings: Sequence[Sequence[Ending]]) -> None:
        """Accept or reject the endings, and move each trace to its next switch.

        Args:
            endings: any number for each of ask()'s prefixes, in its order.
        """
        for index, sampled in zip(self._open, endings, strict=True):
            self._decide(index, sampled)
        self._open = [index for index in self._open if self._advance(index)]

    def revised(self) -> dict[int, list[int]]:
        """Return the token ids of every trace that is not left out, revised or as it was."""
        return {index: trace.token_ids for index, trace in self._traces.items()}

    def counts(self) -> Counter[str]:
        """Return how many traces are left out, by reason, and without_switch, kept, revised."""
        changed = {decision.trace for decision in self.log if decision.accepted}
        found = Counter(self.left_out.values())
        for index in self._traces:
            if index not in self._had_switch:
                found["without_switch"] += 1
            else:
                found["revised" if index in changed else "kept"] += 1
        return found

    def _reason(self, trace: Trace) -> str:
        """Return why a trace is left out; "": it is not."""
        if trace.noted in _NO_VERDICT:
            return "no_verdict"
        if trace.noted != "correct":
            return "wrong"
        if trace.truncated:
            return "truncated"
        if trace.status != "correct":
            self.refusals.append(
                f"{trace.place} came as correct, but the verifier now says {trace.status}; sample "
                "and judge again with this verifier, or give the one that judged it"
            )
            return "refused"
        return ""

    def _switches(self, trace: _Current) -> list[int]:
        """Return the numbers of the steps that switch and are still to be tried."""
        keywords, later = self._settings.keywords, enumerate(trace.steps[1:], 1)
        return [
            number
            for number, (begin, end) in later
            if begin > trace.tried_to and is_switch(trace.text[begin:end], keywords)
        ]

    def _advance(self, index: int) -> bool:
        """Find a trace's next switch; return whether there is one to try."""
        trace, limit = self._traces[index], self._settings.max_switches
        for number in self._switches(trace):
            if limit is not None and trace.num_tried >= limit:
                self.untried["over_budget"] += 1
                return False
            cut = _tokens_before(trace, trace.steps[number], self._decode)
            if cut is not None:
                trace.switch, trace.cut = number, cut
                return True
            self.untried["inside_token"] += 1
            trace.tried_to = trace.steps[number].begin
        return False

    def _decide(self, index: int, endings: Sequence[Ending]) -> None:
        trace, gamma = self._traces[index], self._settings.gamma
        separator = self._settings.separator
        begin = trace.steps[trace.switch].begin
        existing = value(len(find_steps(trace.text[begin:], separator)), gamma, is_right=True)
        prefix = trace.token_ids[: trace.cut]
        before = len(self._decode(prefix))
        best, chosen = 0.0, None
        for ending in endings:
            ids = [*prefix, *ending.token_ids]
            # Decoded behind its prefix: alone, some tokenizers drop a space at the beginning.
            text = self._decode(ids)
            is_banned = begins_with_switch(text[before:], self._settings)
            kind = "banned" if is_banned else "truncated" if ending.truncated else ending.status
            self.endings[kind] += 1
            steps_left = len(find_steps(text[before:], separator))
            found = value(steps_left, gamma, is_right=kind == "correct")
            if found > best:
                best, chosen = found, (ids, text)
        is_better = best > existing
        self.log.append(Decision(index, trace.switch, existing, best, is_better))
        if is_better and chosen is not None:
            trace.token_ids, trace.text = chosen
            trace.steps = find_steps(trace.text, separator)
        trace.tried_to = begin
        trace.num_tried += 1


def _tokens_before(trace: _Current, step: Step, decode: Decode) -> int | None:
    """Return how many tokens stand before a step; None: it begins inside a token.

    White space at the beginning of the step may be on either side.
    """
    own = trace.text[step.begin : step.end]
    latest = step.begin + len(own) - len(own.lstrip())
    low, high = 0, len(trace.token_ids)
    while low < high:
        middle = (low + high) // 2
        if len(decode(trace.token_ids[:middle])) < step.begin:
            low = middle + 1
        else:
            high = middle
    # A character whose bytes are not complete may count as several: look around, too.
    for count in range(max(0, low - _SPLIT_CHARACTER), low + _SPLIT_CHARACTER + 1):
        head = decode(trace.token_ids[:count])
        if step.begin <= len(head) <= latest and trace.text.startswith(head):
            return count
    return None
