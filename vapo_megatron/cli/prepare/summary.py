"""What became of the rows: counts for the terminal, and for the metadata of the file."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

Template = Literal["answer", "chat", "none"]
TEMPLATES: tuple[Template, ...] = get_args(Template)


@dataclasses.dataclass
class Summary:
    """Counts of rows read, and of problems dropped and written."""

    files: list[dict[str, Any]]
    """file, shape and rows of each input."""
    template: Template
    max_prompt_tokens: int
    rows: int = 0
    duplicates: int = 0
    """Rows that repeat an earlier problem."""
    conflicting: int = 0
    """Problems whose rows disagree on the answer."""
    unusable: int = 0
    """Rows and problems whose answer is missing or refused by the verifier."""
    unusable_example: str = ""
    solved: int = 0
    """Problems whose reference solution passes their tests."""
    unsolved: int = 0
    """Problems whose reference solution does not, or whose tests cannot be read."""
    unsolved_example: str = ""
    prose: int = 0
    """Problems whose answer is prose, which math compares letter by letter."""
    prose_example: str = ""
    without_answer: int = 0
    """Problems written without an answer."""
    columns: list[str] = dataclasses.field(default_factory=list)
    """Written beside prompt and answer."""
    too_long: int = 0
    """Problems of more than max_prompt_tokens."""
    written: int = 0
    longest_prompt_tokens: int = 0
    first_prompt: str = ""
    """As its tokens read, with special tokens, cut in the middle."""

    def nothing_left(self) -> str:
        """Return what became of the problems where none is left."""
        return (
            f"nothing is left to write: of {self.rows - self.duplicates:,} problems "
            f"{self.conflicting:,} have rows with different answers, {self.unusable:,} an answer "
            f"that the verifier cannot use, {self.unsolved:,} a solution that does not pass their "
            f"tests, {self.too_long:,} more than {self.max_prompt_tokens:,} prompt tokens; give "
            "other --data, or raise --max-prompt-tokens"
        )

    def describe(self) -> str:
        """Return a text for the terminal."""
        lines = [f"{f['file']}: shape {f['shape']}, {f['rows']:,} rows" for f in self.files]
        lines += [
            f"{self.rows:10,} rows",
            f"{self.duplicates:10,} of them repeat a problem",
            f"{self.conflicting:10,} problems left out: their rows have different answers",
            f"{self.unusable:10,} left out: the verifier cannot use their answer"
            + (f", such as {self.unusable_example}" if self.unusable else ""),
            f"{self.too_long:10,} problems left out: over {self.max_prompt_tokens:,} prompt tokens",
            f"{self.written:10,} problems written, template {self.template}, the longest of "
            f"{self.longest_prompt_tokens:,} tokens",
            f"columns beside prompt and answer: {', '.join(self.columns) or 'none'}",
        ]
        if self.solved or self.unsolved:
            lines.append(f"{self.solved:10,} reference solutions pass their tests")
        if self.unsolved:
            lines.append(
                f"{self.unsolved:10,} problems left out: their solution does not pass their tests, "
                f"such as {self.unsolved_example}"
            )
        if self.without_answer:
            lines.append(f"{self.without_answer:10,} of them have no answer")
        if self.prose:
            lines.append(
                f"warning: {self.prose:,} answers are prose, such as {self.prose_example}; math "
                "compares words letter by letter: let exact, a judge or hybrid judge them "
                "(reward.verifier, or a column `verifier`)"
            )
        lines.append(f"the first prompt, as its tokens read:\n{self.first_prompt}")
        return "\n".join(lines)
