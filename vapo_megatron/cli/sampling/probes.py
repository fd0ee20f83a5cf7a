"""What evaluates reflection: responses that have begun, and whether their rest reflects on that.

A probe's response starts with a text that the data gives, such as a chain of thought with an error,
and perhaps a trigger ("Wait,"). The policy writes the rest, which alone is judged: once by the
run's verifier, and once for whether it reflects explicitly (arXiv 2504.04022).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vapo_megatron.config import RewardConfig, VapoConfig
from vapo_megatron.data.problems import Problem
from vapo_megatron.errors import ConfigError, DataError
from vapo_megatron.reward.built_in import build
from vapo_megatron.reward.verifier import RunningVerifier, Verdict
from vapo_megatron.rollout.evaluation.judging import JudgedProblems

NOTE_CHARACTERS = 200
"""Of what a verifier said that gave no verdict."""


class Probe(NamedTuple):
    """How responses begin, and what says whether they reflect."""

    prefix_column: str | None = None
    """Of the data: the text that a response starts with; None: an empty one."""
    trigger: str = ""
    """Follows it."""
    verifier: str | None = None
    """Judges with correct that a response reflects; its settings are the section reward's."""
    words: tuple[str, ...] = ()
    """In place of a verifier: one of them in a response counts, whatever its case."""

    def header(self, problems: Sequence[Problem]) -> dict[str, Any]:
        """Return what a samples file says of it; problems: whose responses begin so."""
        digest = hashlib.sha256()
        if (column := self.prefix_column) is not None:
            for problem in problems:
                digest.update(f"{problem.metadata[column]}\0".encode("utf-8", "replace"))
        own = {**self._asdict(), "words": list(self.words), "prefixes": digest.hexdigest()[:16]}
        return {"probe": own}

    @property
    def asks_reflection(self) -> bool:
        """Whether there is a second verdict."""
        return self.verifier is not None or bool(self.words)

    def begun(self, tokenizer: Any, path: str) -> Callable[[Problem], list[int]]:
        """Return what gives the tokens that a problem's response starts with.

        Special tokens in the text are text. It is encoded by itself, as a sampled response is
        decoded by itself.

        Args:
            tokenizer: transformers'.
            path: of the problems, for messages.

        Returns:
            A function that raises DataError for a row without such a text.
        """

        def tokens(problem: Problem) -> list[int]:
            text = self.trigger
            if self.prefix_column is not None:
                prefix = problem.metadata.get(self.prefix_column)
                if not isinstance(prefix, str) or not prefix:
                    raise DataError(
                        f"{path}: the problem {problem.prompt[:60]!r} has "
                        f"{self.prefix_column}={prefix!r}, but --prefix-column must name a column "
                        "of texts; vapo probe makes one"
                    )
                text = prefix + text
            return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

        return tokens

    def check(self, config: VapoConfig) -> None:
        """Refuse what does not fit together.

        Raises:
            ConfigError: names the option.
        """
        if self.verifier is not None and self.words:
            raise ConfigError(
                f"--reflects={self.verifier} and --reflects-words={','.join(self.words)} both say "
                "what reflects; give one of them"
            )
        if self.verifier is not None and self.verifier == config.reward.verifier:
            raise ConfigError(
                f"--reflects={self.verifier} is also reward.verifier, which says what is correct; "
                "give another one, such as an entry of reward.verifiers with use: judge"
            )
        if config.environment.is_on:
            raise ConfigError(
                "--prefix-column, --trigger and --reflects are for responses of one turn, but an "
                "environment answers these; give environment.use=null environment.tools=[]"
            )

    def start(self, reward: RewardConfig) -> RunningVerifier | None:
        """Start the verifier, if there is one; it is to be closed."""
        if self.verifier is None:
            return None
        verifier = build(self.verifier, reward)
        verifier.start()
        return verifier

    def add_reflects(self, judged: JudgedProblems, verifier: RunningVerifier | None) -> None:
        """Write into each response whether it reflects; None: the verifier gave no verdict."""
        asked = [(prompt.problem, r) for prompt, responses in judged for r in responses]
        if verifier is None:
            for _, response in asked:
                response["reflects"] = has_word(response["text"], self.words)
            return
        problems, texts = [p for p, _ in asked], [r["text"] for _, r in asked]
        for (_, response), verdict in zip(asked, verifier.score(texts, problems), strict=True):
            response["reflects"] = _reflects(verdict)
            if response["reflects"] is None:
                response["reflects_note"] = verdict.note[:NOTE_CHARACTERS]


def _reflects(verdict: Verdict) -> bool | None:
    return {"correct": True, "wrong": False}.get(verdict.status)


def has_word(text: str, words: Sequence[str]) -> bool:
    """Return whether a text has one of some words, whole, whatever their case."""
    # Next to a letter or a digit there must be none; a word may begin or end with another sign.
    whole = (rf"(?<!\w(?=\w)){re.escape(word)}(?!(?<=\w)\w)" for word in words)
    return re.search("|".join(whole), text, re.IGNORECASE) is not None
