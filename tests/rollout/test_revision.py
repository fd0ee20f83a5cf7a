"""Retro-Search by hand, on scripted endings, and with a random policy against one trace at a time.

Not exercised: an engine, a verifier and a tokenizer of a model; the tokens here are pieces of text.
"""

import random
from collections import Counter

import pytest

from vapo_megatron.errors import ConfigError
from vapo_megatron.rollout.revision import (
    Decision,
    Ending,
    Revision,
    Settings,
    Trace,
    banned_first_tokens,
    begins_with_switch,
    find_steps,
    is_switch,
    split_steps,
    split_thoughts,
    value,
)

STEPS = [
    "Let x = 3.", "2x is 6.", "Wait, is x 3?", "Yes.", "Alternatively, add x twice.", "3+3=6.",
    "Waiting is over.",
]  # fmt: skip


class Pieces:
    """Tokens that are whatever pieces of text they were made of."""

    def __init__(self):
        self.texts = []

    def encode(self, *pieces):
        """The ids of some pieces."""
        self.texts += [piece for piece in pieces if piece not in self.texts]
        return [self.texts.index(piece) for piece in pieces]

    def decode(self, ids):
        """Their text."""
        return "".join(self.texts[token] for token in ids)


def joined(*steps):
    """Pieces of a text: of each step two, and the blank line."""
    found = []
    for step in steps:
        found += [step[:2], step[2:], "\n\n"]
    return [piece for piece in found[:-1] if piece]


def revision_of(pieces, *texts, **settings):
    traces = [
        Trace(pieces.encode(*text), f"trace {i}", "correct", "correct")
        for i, text in enumerate(texts)
    ]
    return Revision(traces, pieces.decode, Settings(**settings))


def test_a_trace_in_steps_and_thoughts():
    text = "\n\n".join(STEPS)
    assert split_steps(text) == STEPS
    assert split_thoughts(text) == [STEPS[:2], STEPS[2:4], STEPS[4:]]
    # Runs of blank lines are one, white space alone is no step, and one newline ends none.
    assert split_steps("\n\nA\nb\n \n\t\n\n  C\n\n \n") == ["A\nb", "  C"]
    assert split_steps("") == split_steps(" \n\n") == []
    assert split_steps("a=1,b=2,", separator=",") == ["a=1", "b=2"]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("Wait, no", True), ("Waiting is over.", False), ("But 3", True), ("Butter", False),
        ("  Hmm.", True), ("So but", False), ("wait, no", False), ("Another way", True),
        ("However,it", True), ("Not sure.", True), ("Not surely", False), ("Hmmm", True),
        ("Hmmmm", False), ("Wait", True), ("", False),
    ],
)  # fmt: skip
def test_a_switch_begins_with_a_keyword(step, expected):
    assert is_switch(step) == expected


def test_keywords_are_an_option():
    assert is_switch("Moment", ["Moment"]) and not is_switch("Wait", ["Moment"])
    # What ends in no letter may have one behind it, and is no pattern.
    assert is_switch("...but", ["..."]) and not is_switch("abc", ["..."])


@pytest.mark.parametrize(
    "block",
    [
        "```python\nx = 1\n\nWait = 2\n\nBut = 3\n```",
        "~~~\na\n\nWait\n~~~",
        "  ````\n```\n\nWait\n  ````",
        "$$\n1\n\nWait\n$$",
        "\\[\n1\n\nWait\n\\]",
        "\\begin{align}\n1\n\nWait\n\\end{align}",
    ],
)
def test_code_and_formulas_are_not_divided(block):
    text = f"A\n\n{block}\n\nWait, B"
    assert split_steps(text) == ["A", block, "Wait, B"]
    assert len(split_thoughts(text)) == 2


def test_what_is_no_block_hides_nothing():
    # A formula that is never closed, and marks within a line.
    for text in ("Cost $$\n\nWait\n\nB", "\\[\n\nWait\n\nB", "```x``` y\n\nWait\n\nB"):
        assert split_steps(text)[1:] == ["Wait", "B"], text
    # Code that is never closed ends with the text, as in Markdown.
    assert split_steps("A\n\n```\nx\n\nWait") == ["A", "```\nx\n\nWait"]


@pytest.mark.parametrize(
    ("steps_left", "is_right", "expected"),
    [(6, True, 0.531441), (3, True, 0.729), (3, False, 0), (6, False, 0), (1, True, 0.9)],
)
def test_values(steps_left, is_right, expected):
    assert value(steps_left, 0.9, is_right=is_right) == pytest.approx(expected, abs=1e-15)


def test_a_scripted_revision():
    pieces = Pieces()
    revision = revision_of(pieces, joined(*STEPS))
    (asked,) = revision.ask()
    # The prefix is the trace's own tokens.
    assert asked.token_ids == pieces.encode(*joined(*STEPS))[:6]
    assert pieces.decode(asked.token_ids) == "Let x = 3.\n\n2x is 6.\n\n"
    script = [
        (["So it is 7."], "wrong"),
        (["Wait, no.", "6."], "correct"),
        (["Twice 3 is 6, done.", "6."], "correct"),
        (["3+3 is 6.", "Check.", "So 6."], "correct"),
    ]
    revision.decide([[Ending(pieces.encode(*joined(*s)), status) for s, status in script]])
    assert revision.ask() == [], "the revised trace has no switch"
    assert revision.log == [Decision(0, 2, pytest.approx(0.59049), pytest.approx(0.81), True)]
    assert pieces.decode(revision.revised()[0]) == (
        "Let x = 3.\n\n2x is 6.\n\nTwice 3 is 6, done.\n\n6."
    )
    assert revision.endings == {"wrong": 1, "banned": 1, "correct": 2}
    assert revision.counts() == {"revised": 1}


def test_a_switch_that_is_kept_leads_to_the_next_one():
    pieces = Pieces()
    revision = revision_of(pieces, joined(*STEPS))
    revision.decide([[Ending(pieces.encode("So 6."), "wrong")]])
    (asked,) = revision.ask()
    assert pieces.decode(asked.token_ids) == "\n\n".join(STEPS[:4]) + "\n\n"
    revision.decide([[Ending(pieces.encode("6."), "correct")]])
    assert revision.log == [
        Decision(0, 2, pytest.approx(0.9**5), 0.0, False),
        Decision(0, 4, pytest.approx(0.9**3), 0.9, True),
    ]
    assert pieces.decode(revision.revised()[0]) == "\n\n".join([*STEPS[:4], "6."])


def test_an_accepted_ending_may_have_switches_of_its_own():
    pieces = Pieces()
    revision = revision_of(pieces, joined(*STEPS))
    revision.decide([[Ending(pieces.encode(*joined("Fine.", "But why?", "6.")), "correct")]])
    (asked,) = revision.ask()
    assert pieces.decode(asked.token_ids) == "\n\n".join([*STEPS[:2], "Fine."]) + "\n\n"
    revision.decide([[]])
    assert revision.ask() == [] and revision.log[-1] == (0, 3, pytest.approx(0.81), 0.0, False)


def test_equal_value_replaces_nothing_and_the_first_of_equal_endings_is_taken():
    pieces = Pieces()
    same = Ending(pieces.encode(*joined("So.", "6.")), "correct")
    revision = revision_of(pieces, joined("A", "Wait", "B"))
    revision.decide([[same]])
    assert revision.log == [Decision(0, 1, pytest.approx(0.81), pytest.approx(0.81), False)]
    assert revision.counts() == {"kept": 1}
    revision = revision_of(pieces, joined("A", "Wait", "B", "C"))
    revision.decide([[same, Ending(pieces.encode(*joined("Thus.", "6.")), "correct")]])
    assert pieces.decode(revision.revised()[0]) == "A\n\nSo.\n\n6."
    # With gamma 1 no ending is better than a right one.
    revision = revision_of(pieces, joined("A", "Wait", "B"), gamma=1.0)
    revision.decide([[Ending(pieces.encode("6."), "correct")]])
    assert revision.log == [Decision(0, 1, 1.0, 1.0, False)]


def test_an_ending_at_the_token_limit_and_one_without_verdict_have_no_value():
    pieces = Pieces()
    revision = revision_of(pieces, joined("A", "Wait", "B"))
    short = pieces.encode("6.")
    revision.decide([[Ending(short, "correct", truncated=True), Ending(short, "timed_out")]])
    assert revision.log == [Decision(0, 1, pytest.approx(0.81), 0.0, False)]
    assert revision.endings == {"truncated": 1, "timed_out": 1}


def test_traces_that_are_not_revised_are_counted_and_refused_by_name():
    pieces = Pieces()
    ids = pieces.encode(*joined("A", "Wait", "B"))
    traces = [
        Trace(ids, "a", None, "correct"),
        Trace(ids, "b", "timed_out", "correct"),
        Trace(ids, "c", "wrong", "correct"),
        Trace(ids, "d", "unparsable", "correct"),
        Trace(ids, "e", "correct", "correct", truncated=True),
        Trace(ids, "out.jsonl, problem 3, sample 1", "correct", "wrong"),
        Trace(pieces.encode(*joined("A", "B")), "g", "correct", "correct"),
        Trace(ids, "h", "correct", "correct"),
    ]
    revision = Revision(traces, pieces.decode, Settings())
    assert [asked.trace for asked in revision.ask()] == [7]
    revision.decide([[]])
    assert revision.left_out == {
        0: "no_verdict", 1: "no_verdict", 2: "wrong", 3: "wrong", 4: "truncated", 5: "refused",
    }  # fmt: skip
    assert revision.refusals == [
        "out.jsonl, problem 3, sample 1 came as correct, but the verifier now says wrong; sample "
        "and judge again with this verifier, or give the one that judged it"
    ]
    assert revision.counts() == {
        "no_verdict": 2, "wrong": 2, "truncated": 1, "refused": 1, "without_switch": 1, "kept": 1,
    }  # fmt: skip
    # One without a switch is copied.
    assert revision.revised() == {6: pieces.encode(*joined("A", "B")), 7: ids}


def test_keywords_in_code_and_within_lines_ask_nothing():
    pieces = Pieces()
    text = ["So but\nno. Wait", "\n\n", "```\na\n\nWait\n```", "\n\n", "B"]
    revision = revision_of(pieces, text)
    assert revision.ask() == [] and revision.counts() == {"without_switch": 1}


def test_a_switch_inside_a_token_is_not_tried_and_white_space_may_be_on_either_side():
    pieces = Pieces()
    revision = revision_of(
        pieces,
        ["A", ".\n\nWa", "it", "\n\n", "But", "\n\nC"],
        # As byte-level tokenizers divide an indented line.
        ["A", ".\n\n ", " Wait", "\n\nC"],
    )
    assert [pieces.decode(a.token_ids) for a in revision.ask()] == ["A.\n\nWait\n\n", "A.\n\n "]
    assert revision.untried == {"inside_token": 1}
    # Behind the space, too, a keyword is one.
    revision.decide([[Ending(pieces.encode("Hmm"), "correct")]] * 2)
    assert revision.endings == {"banned": 2}


@pytest.mark.parametrize("more", range(16))
def test_characters_whose_bytes_are_divided_among_tokens(more):
    before = "a" * more + "é→😀\n\n"
    ids = list(f"{before}Wait → é\n\nB".encode())

    def decode(some):
        # Of a character that is not complete each byte counts as one.
        return bytes(some).decode("utf-8", "surrogateescape")

    revision = Revision([Trace(ids, "a", "correct", "correct")], decode, Settings())
    (asked,) = revision.ask()
    assert decode(asked.token_ids) == before


def test_a_budget():
    pieces = Pieces()
    texts = joined("A", "Wait", "But", "Hmm"), joined("A", "Wait")
    revision = revision_of(pieces, *texts, max_switches=2)
    rounds = []
    while asked := revision.ask():
        rounds.append([prefix.trace for prefix in asked])
        revision.decide([[]] * len(asked))
    assert rounds == [[0, 1], [0]]
    assert revision.untried == {"over_budget": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 0.0}, r"--gamma=0 must be in \(0, 1\]; change it"),
        ({"gamma": 1.1}, r"--gamma=1.1 must be in \(0, 1\]"),
        ({"gamma": float("nan")}, "--gamma=nan must be in"),
        ({"keywords": ()}, "--keywords= must be one word or more"),
        ({"keywords": ("Wait", " ")}, "--keywords=Wait,  must be one word or more"),
        ({"max_switches": 0}, "--max-switches=0 must be at least 1"),
        ({"separator": "("}, r"--separator=\( is no regular expression \(missing \), un"),
        ({"separator": "\n*"}, "matches nothing at all; change it"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ConfigError, match=message):
        Revision([], str, Settings(**settings))


def test_the_tokens_that_are_banned():
    texts = ["Wait", " Wait", "Waiting", "\n", "But,", "Al", "Not", " Not sure", "w", "\n\nHmm"]
    assert banned_first_tokens(texts) == [0, 1, 4, 7, 9]
    assert banned_first_tokens(texts, ["w"]) == [8]


def test_a_keyword_of_several_tokens_is_seen_in_the_finished_step():
    settings = Settings()
    for ending in ("Not sure about it.\n\nSo 6.", "\n\nWait", "  But"):
        assert begins_with_switch(ending, settings), ending
    for ending in ("Not surely.", "So 6.\n\nWait", "", "\n\n"):
        assert not begins_with_switch(ending, settings), ending


def drawn_steps(rng, count):
    starts = ("Wait", "But", "Hmm,", "So", "Waiting", "Thus", "so But")
    return [f"{rng.choice(starts)} {rng.randint(0, 9)}" for _ in range(count)]


def policy(name, prefix, seed):
    """Endings, each (steps, status, truncated), by what stands before them."""
    rng = random.Random(f"{seed} {name} {prefix}")
    return [
        (
            drawn_steps(rng, rng.randint(1, 6)), rng.choice(["correct", "correct", "wrong"]),
            rng.random() < 0.1,
        )
        for _ in range(rng.randint(0, 3))
    ]  # fmt: skip


def one_at_a_time(name, steps, gamma, limit, seed):
    """The trace and its decisions, on lists of steps."""

    def switches(step):
        return step.split()[0] in ("Wait", "But", "Hmm,")

    position, log = 0, []
    while True:
        later = [s for s in range(position + 1, len(steps)) if switches(steps[s])]
        if not later or len(log) == limit:
            return steps, log
        position = later[0]
        best, chosen = 0.0, None
        for ending, status, truncated in policy(name, steps[:position], seed):
            is_right = status == "correct" and not truncated and not switches(ending[0])
            if is_right and gamma ** len(ending) > best:
                best, chosen = gamma ** len(ending), ending
        existing = gamma ** (len(steps) - position)
        log.append((name, position, existing, best, best > existing))
        if best > existing:
            steps = steps[:position] + chosen


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limit", [None, 2])
def test_many_traces_at_once_are_revised_as_one_at_a_time(seed, limit):
    rng, pieces = random.Random(seed), Pieces()
    given = [drawn_steps(rng, rng.randint(1, 14)) for _ in range(80)]
    revision = revision_of(pieces, *(joined(*steps) for steps in given), max_switches=limit)
    rounds = 0
    while asked := revision.ask():
        rounds += 1
        sampled = []
        for trace, ids in asked:
            prefix = pieces.decode(ids).removesuffix("\n\n").split("\n\n")
            sampled.append([
                Ending(pieces.encode(*joined(*steps)), status, truncated)
                for steps, status, truncated in policy(trace, prefix, seed)
            ])  # fmt: skip
        revision.decide(sampled)
    expected = [one_at_a_time(i, steps, 0.9, limit, seed) for i, steps in enumerate(given)]
    found = {i: pieces.decode(ids).split("\n\n") for i, ids in revision.revised().items()}
    assert found == {i: steps for i, (steps, _) in enumerate(expected)}
    assert sorted(revision.log) == sorted(row for _, log in expected for row in log)
    accepted = Counter(decision.accepted for decision in revision.log)
    assert len(accepted) == 2 and min(accepted.values()) > 10, "either decision is tried"
    assert rounds == max(len(log) for _, log in expected) > 1


def test_steps_have_their_places():
    text = "\n\n a\n\nb "
    assert [text[s.begin : s.end] for s in find_steps(text)] == [" a", "b "]
