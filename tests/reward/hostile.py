r"""Hostile responses from a seed: none answers its question, however it is read.

A kind is a function (random generator, the ground truth) -> response. Some hold the ground truth
where it must not count: in a list, before another final answer, in a box that never closes.
"""

from __future__ import annotations

import random
from collections.abc import Callable

# Nothing below comes upon one of these by chance.
GOLDS = ("7919", "7919/7907", r"\sqrt{7919}", r"\{7901, 7919\}", "x^2 + 7919", r"\text{Zanzibar}")
MARKERS = (r"\boxed{%s}", "Answer: %s", "#### %s", "**Final Answer:** $%s$", r"$$\boxed{%s}$$")
SCRIPTS = (
    "\u0661\u0662\u0663",  # Arabic digits
    "\uff17\uff19\uff11\uff19",  # full-width digits
    "\u0440\u0430\u0443\u0440\u0430l",  # Cyrillic letters that look Latin
    "\u4e03\u5343\u4e5d\u767e\u5341\u4e5d",
    "\u05d0\u05d1\u05d2",
    "\u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001d7d5\U0001d7d7",  # mathematical bold digits
    "\u00bd\u00b2\u2153",
    "\U0001f9ee\U0001f469\u200d\U0001f52c",
    "\ud800",  # half a surrogate pair
)
MARKS = "\u202e\u202d\u200f\u200e\u2066\u2067\u2069\u200b\u200d\u2060\ufeff\u0301\u0336\u00ad"
CONTROLS = "".join(map(chr, (*range(9), *range(11, 32), 127, 133, 155))) + "\u2028\u2029"
COMMANDS = r"""\frac \sqrt \text \left \right \sum_{i=1}^{9} \int_0^1 \prod \lim_{x\to0} \log \sin
\cdot \times \div \pm \cup \cap \in \subset \le \ne \infty \emptyset \mathbb{R} \begin{pmatrix}
\end{pmatrix} \begin{cases} \end{cases} \\ & \quad \, \! \% \$ \# \_ \{ \} \binom \overline \vec
\operatorname{det} \max \gcd \lfloor \rfloor ^ _ { } ( ) [ ] | ! ' " ; , = < > ~ @ ` # % ? x y 1 2
34 0.5 e i""".split()
EXPANDING = (
    r"\def\a{\a\a}\a",
    r"\newcommand{\b}[1]{#1#1#1}\b{\b{\b{\b{9}}}}",
    r"\loop\iftrue 1\repeat",
    r"\csname end\endcsname",
    r"\catcode`\%=0 %input{/etc/passwd}",
    r"\input{/etc/passwd}",
    r"\write18{touch CANARY}",
    r"\expandafter\def\csname x\endcsname{\x}\x",
    r"\directlua{os.execute('touch CANARY')}",
    r"\href{javascript:alert(1)}{7}",
)
CODE = (
    "__import__('os').system('touch CANARY')",
    "open('CANARY', 'w').close()",
    "exec(\"open('CANARY','w')\")",
    r"\operatorname{exec}(open(1))",
    r"\text{__import__('os').system('touch CANARY')}",
    r"x_{__import__('os').system('touch CANARY')}",
    "eval(compile('1', '', 'eval'))",
    "[x for x in ().__class__.__base__.__subclasses__()]",
    "(lambda f: f(f))(lambda f: f(f))",
    "$(touch CANARY)",
    "`touch CANARY`; rm -rf ~",
    "<script>alert(1)</script>",
    "'; DROP TABLE answers; --",
    "{{7*7}}${7*7}#{7*7}%s%n%x",
    '{"status": "correct"}',
    '", "answer": null, "gold": "',
    "\x00\x00\x00\x15" + '{"status": "correct"}',
    "Verdict(status='correct')",
)
SEPARATORS = (
    ", |; | or | and | or maybe |, or | / | |\\\\| & |\\quad |\\ | \\text{ or } | \\text{ maybe } "
    "| \\lor | \\vee | \\cup | \\to | \\mid |: | \\pm | \\cdots |, \\ldots, |\n|\t| \\hspace{1em} "
    "|...| \\boxed | \\fbox | answer | \\implies |) (|], [|\\}, \\{| \\text{answer: } | \\tag{1} "
).split("|")
# These would take for ever, or all memory. Each costs a worker its limit.
ENDLESS = (r"\{9^{9^{9^{9}}}\}", r"\{8^{9^{9^{9}}}\}")
FILLING = (r"\{2^{10^{12}}\}", r"\{2^{10^{13}}\}")
COMPUTED = r"\{7919\}"
"""A ground truth with which they are compared by computing them."""


def _number(rng: random.Random) -> str:
    return str(rng.choice((rng.randrange(10), rng.randrange(7000), rng.randrange(10**30))))


def _marked(rng: random.Random, answer: str) -> str:
    prose = " ".join(rng.choices(("so", "we", "get", "hence", "$x$", "\\(y\\)", "1."), k=5))
    return prose + rng.choice((" ", "\n")) + rng.choice(MARKERS) % answer


def _tower(rng: random.Random, gold: str) -> str:
    depth, base = rng.randrange(2, 9), rng.randrange(2, 99)
    # Above a symbol there is nothing to compute; of numbers it is among ENDLESS.
    return _marked(rng, "x^{" * depth + str(base) + "}" * depth)


def _endless(rng: random.Random, gold: str) -> str:
    return rng.choice(MARKERS[:3]) % rng.choice(ENDLESS)


def _filling(rng: random.Random, gold: str) -> str:
    return rng.choice(MARKERS[:3]) % rng.choice(FILLING)


def _nested(rng: random.Random, gold: str) -> str:
    # The parser's time doubles with each level of some; very deep ones are too long to be judged.
    depth = rng.choice((3, 4, 5, 600))
    opening, closing = rng.choice(
        (("(", ")"), ("{", "}"), ("[", "]"), (r"\{", r"\}"), (r"\frac{1}{", "}"), (r"\sqrt{", "}"))
        + ((r"\left(", r"\right)"), (r"\text{", "}"), ("|", "|"), (r"\boxed{", "}"), ("x^{", "}"))
    )
    return _marked(rng, opening * depth + str(rng.randrange(99)) + closing * depth)


def _long(rng: random.Random, gold: str) -> str:
    unit = rng.choice(
        (r"\boxed{", "Answer: ", "#### ", "{", "}", "$", " ", "\n", "9", "1+", "(", "\\", "\x00")
        + (r"\frac{", "nswer", "\\boxed", "#", "*", f"{gold}, 5, ", f"\\boxed{{{gold} ", "\u202e")
        + ("Answer: }", "ANSWER: $", "$5$ ", r"\(", r"\boxed{}", "Answer: **\n")
    )
    body = unit * (rng.choice((10**4, 10**5, 2**20)) // len(unit))
    return rng.choice((body, "Answer: " + body, r"\boxed{" + body + "}", body + "Answer: 1"))


def _unclosed(rng: random.Random, gold: str) -> str:
    box = rng.choice((r"\boxed{", r"\fbox{{", r"\boxed{\frac{1}{", r"\boxed{\text{", r"$\boxed{("))
    before = rng.choice(("", "Answer: 5 ", "#### 6 ", _number(rng) + " "))
    return before + box + gold + rng.choice(("", " ", "{", r"\}"))


def _control(rng: random.Random, gold: str) -> str:
    place = rng.randrange(1, len(gold))
    answer = gold[:place] + "".join(rng.choices(CONTROLS, k=rng.randrange(1, 4))) + gold[place:]
    return _marked(rng, answer + rng.choice(("+1", " 3", "!", "\x00\x7f", "\x1b[2J", "5")))


def _script(rng: random.Random, gold: str) -> str:
    parts = rng.choices(SCRIPTS, k=3) + rng.choices(("7", "+", " ", "x", gold), k=2)
    rng.shuffle(parts)
    return _marked(rng, "".join(parts) + rng.choice(SCRIPTS))


def _bidirectional(rng: random.Random, gold: str) -> str:
    place = rng.randrange(1, len(gold))
    first, second = rng.choices(MARKS, k=2)
    return _marked(rng, gold[:place] + first + gold[place:][::-1] + second + "1")


def _expanding(rng: random.Random, gold: str) -> str:
    before, behind = rng.choice((("", ""), (_number(rng), ""), ("", gold), (gold, _number(rng))))
    return _marked(rng, before + rng.choice(EXPANDING) + behind)


def _code(rng: random.Random, gold: str) -> str:
    return _marked(rng, rng.choice(("", _number(rng) + " ")) + rng.choice(CODE))


def _guesses(rng: random.Random, gold: str) -> str:
    # Not 0 or 1: divided by one, the right answer is right.
    guesses = [gold] + [str(rng.randrange(2, 7000)) for _ in range(rng.randrange(1, 6))]
    rng.shuffle(guesses)
    separator = rng.choice(SEPARATORS)
    # Behind the first line, or the first sentence, Answer: reads no further: only boxes there.
    marker = MARKERS[0] if separator in ("\n", "...") else rng.choice(MARKERS)
    return marker % separator.join(guesses)


def _quoted(rng: random.Random, gold: str) -> str:
    quoted = rng.choice((*MARKERS, "The answer is %s.", "The problem says %s.", "> %s")) % gold
    wrong = rng.choice(MARKERS[:3]) % str(rng.randrange(7000))
    return rng.choice((f"{quoted}\n{wrong}", f"{quoted} {quoted} No: {wrong}", f"It is {gold}."))


def _undefined(rng: random.Random, gold: str) -> str:
    answer = rng.choice(
        (r"\frac{0}{0}", r"\frac{%s}{0}", r"\infty - \infty", r"%s \cdot \infty", "nan", "oo", "-")
        + (
            r"\emptyset",
            r"\{\}",
            r"\mathbb{R}",
            r"(-\infty, \infty)",
            "x",
            r"x \in \mathbb{R}",
            "?",
        )
        + (r"\log(0)", r"\text{True}", r"\text{correct}", r"\mathbb{C}", r"\{x\}", "()", "[]")
        + (r"0^{-1}", r"%s^\infty", r"\{%s, \ldots\}", r"%s \pm %s", r"%s \neq %s")
    )
    return _marked(rng, answer.replace("%s", gold))


def _soup(rng: random.Random, gold: str) -> str:
    return _marked(rng, rng.choice(("", " ")).join(rng.choices(COMMANDS, k=rng.randrange(2, 14))))


def _bytes(rng: random.Random, gold: str) -> str:
    return _marked(rng, rng.randbytes(rng.randrange(1, 60)).decode("latin-1"))


def _mutated(rng: random.Random, gold: str) -> str:
    # Of texts that do not hold the ground truth: a mutation may make that the final answer.
    text = list(rng.choice((_code, _soup, _tower, _nested, _undefined))(rng, "5"))
    for _ in range(rng.randrange(1, 6)):
        place = rng.randrange(len(text))
        controls, command = rng.choice(CONTROLS), rng.choice(COMMANDS)
        text[place] = rng.choice((text[place] * 2, controls, command, "{", "}", ""))
    return "".join(text)


KINDS: tuple[Callable[[random.Random, str], str], ...] = (
    *(_tower, _nested, _unclosed, _control, _script, _bidirectional, _expanding, _code, _guesses),
    *(_quoted, _undefined, _soup, _bytes, _mutated),
)
COSTLY = (_long, _endless, _long, _filling)
"""Megabytes, and what each takes a worker's whole limit: one in 60."""


def hostile_responses(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """(kind, response, ground truth) of different responses, the kinds in turn."""
    rng = random.Random(seed)
    corpus: dict[str, tuple[str, str, str]] = {}
    while len(corpus) < count:
        gold, kind = rng.choice(GOLDS), KINDS[len(corpus) % len(KINDS)]
        if len(corpus) % 60 == 0:
            gold, kind = COMPUTED, COSTLY[len(corpus) // 60 % len(COSTLY)]
        response = kind(rng, gold)
        if response in corpus:
            response = f"{rng.randrange(10**9)} {response}"
        corpus[response] = (kind.__name__.strip("_"), response, gold)
    return list(corpus.values())
