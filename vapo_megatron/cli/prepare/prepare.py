"""Converts published data sets to training data: deduplicated, in one prompt template, checked.

Rows are streamed; memory holds each distinct problem once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.cli.prepare.columns import (
    ANSWER_PREFIX,
    ANSWER_SUFFIX,
    choose_shape,
    read_problem,
    strip_instructions,
)
from vapo_megatron.cli.prepare.rows import Choose, count_rows, find_file, read_rows
from vapo_megatron.data.chat import Message
from vapo_megatron.data.problems import Problem
from vapo_megatron.data.storage import replacing
from vapo_megatron.errors import DataError
from vapo_megatron.rollout.tokenizer import ChatTemplate

if TYPE_CHECKING:
    from vapo_megatron.reward.verifier import RunningVerifier

Template = Literal["answer", "chat", "none"]
TEMPLATES: tuple[Template, ...] = get_args(Template)
METADATA_KEY = b"vapo_megatron.prepare"
"""Key of the summary, as JSON, in the parquet file's metadata."""
_CHUNK = 1000
"""Problems between two updates of the progress bar."""


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
    unparsable: int = 0
    """Problems whose answer the verifier cannot read."""
    too_long: int = 0
    """Problems of more than max_prompt_tokens."""
    written: int = 0
    longest_prompt_tokens: int = 0

    def describe(self) -> str:
        """Return a text for the terminal."""
        lines = [f"{f['file']}: shape {f['shape']}, {f['rows']:,} rows" for f in self.files]
        lines += [
            f"{self.rows:10,} rows",
            f"{self.duplicates:10,} of them repeat a problem",
            f"{self.conflicting:10,} problems left out: their rows have different answers",
            f"{self.unparsable:10,} problems left out: the verifier cannot read their answer",
            f"{self.too_long:10,} problems left out: over {self.max_prompt_tokens:,} prompt tokens",
            f"{self.written:10,} problems written, template {self.template}, the longest of "
            f"{self.longest_prompt_tokens:,} tokens",
        ]
        return "\n".join(lines)


@dataclasses.dataclass
class _Kept:
    """The first row of a problem, and the different answers of later rows."""

    where: str
    prompt: str
    """The text, or the last message's; its instructions are gone unless the template keeps them."""
    answer: str
    earlier: tuple[Message, ...]
    other_answers: set[str] = dataclasses.field(default_factory=set)

    @property
    def problem(self) -> Problem:
        return Problem(self.prompt, self.answer)


def prepare(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: Any,
    verifier: RunningVerifier,
    template: Template = "answer",
    max_prompt_tokens: int = 2048,
    choose: Choose = choose_shape,
    drop_unparsable: bool = False,
    overwrite: bool = False,
) -> Summary:
    """Write a parquet file with the columns `prompt` and `answer`.

    Args:
        sources: files or hub ids, see rows.find_file; deduplicated across all of them.
        out: ends in .parquet; written atomically.
        tokenizer: transformers', of the model to train.
        verifier: parses the answers.
        template: answer: the problem within DAPO's instructions, as text; chat: the same as a user
            message in the tokenizer's chat template; none: prompts unchanged. The first two first
            remove columns.INSTRUCTIONS. Messages before the problem need chat, or none, which
            then uses the chat template too.
        max_prompt_tokens: problems with longer prompts are dropped.
        choose: chooses each file's shape.
        drop_unparsable: drop problems whose answer the verifier cannot parse, instead of an error.
        overwrite: replace out.

    Raises:
        DataError: names the file, the line or row, the problem and the remedy.
    """
    if out.suffix != ".parquet":
        raise DataError(f"--out={out} must end in .parquet")
    if max_prompt_tokens < 1:
        raise DataError(f"--max-prompt-tokens={max_prompt_tokens} must be at least 1")
    if out.exists() and not overwrite:
        raise DataError(f"--out={out} exists; give another file, or --overwrite")
    render = make_template(template, tokenizer)
    summary = Summary([], template, max_prompt_tokens)
    kept = _read([find_file(source) for source in sources], template, choose, summary)
    kept = _readable(kept, verifier, drop_unparsable, summary)
    kept = _unanimous(kept, verifier, summary)
    problems = list(_rendered(kept, render, tokenizer.encode, summary))
    if not problems:
        raise DataError(
            f"nothing is left to write: of {summary.rows - summary.duplicates:,} problems "
            f"{summary.conflicting:,} have rows with different answers, {summary.unparsable:,} an "
            f"answer that the verifier cannot read, {summary.too_long:,} more than "
            f"{max_prompt_tokens:,} prompt tokens; give other --data, or raise --max-prompt-tokens"
        )
    summary.written = len(problems)
    _write(out, problems, summary)
    return summary


def make_template(name: Template, tokenizer: Any) -> Callable[..., str]:
    """Return a function that formats a problem, and the messages before it, as a prompt.

    Templates: see prepare.

    Raises:
        DataError: here or when called: the tokenizer has no chat template, it refuses the messages,
            its text would be encoded to other ids, or the template has no place for them.
    """
    as_chat = ChatTemplate(tokenizer)

    def render(problem: str, earlier: Sequence[Message] = ()) -> str:
        if name == "none" and not earlier:
            return problem
        if name == "answer" and earlier:
            raise DataError(
                "has messages before the problem, for which --template answer has no place; give "
                "--template chat"
            )
        text = problem if name == "none" else f"{ANSWER_PREFIX}{problem}{ANSWER_SUFFIX}"
        if name == "answer":
            return f"{text}\n"
        try:
            return as_chat([*earlier, {"role": "user", "content": text}])
        except DataError as error:
            raise DataError(
                f"has messages before the problem, but {error}; remove the row, or give another "
                "--tokenizer"
            ) from None

    if name == "chat":
        try:
            as_chat([{"role": "user", "content": "1 + 1"}])
        except DataError as error:
            raise DataError(f"--template=chat: {error}; give --template answer") from None
    return render


def _read(
    paths: Sequence[Path], template: Template, choose: Choose, summary: Summary
) -> list[_Kept]:
    """Return the first row of each problem, in order, with the other answers that it has."""
    first: dict[bytes, _Kept] = {}
    for path in paths:
        shape, rows = read_rows(path, choose)
        count, total = 0, count_rows(path)
        with ProgressBar(f"rows of {path.name}") as bar:
            for count, (where, row) in enumerate(rows, start=1):
                problem = read_problem(shape, row, where)
                bare = strip_instructions(problem.prompt)
                prompt = problem.prompt if template == "none" else bare
                new = _Kept(where, prompt, problem.answer, problem.earlier)
                known = first.setdefault(_key(bare, problem.earlier), new)
                if known.answer != new.answer:
                    known.other_answers.add(new.answer)
                if count % _CHUNK == 0 or count == total:
                    bar.show(count, total)
        if not count:
            raise DataError(f"data file {path} holds no rows; give a file with at least one")
        summary.files.append({"file": str(path), "shape": shape.name, "rows": count})
        summary.rows += count
    summary.duplicates = summary.rows - len(first)
    return list(first.values())


def _key(problem: str, earlier: Sequence[Message]) -> bytes:
    """Hash a problem and the messages before it, ignoring differences in whitespace."""
    said = [("user", problem), *((m["role"], m["content"]) for m in earlier)]
    text = json.dumps([(role, " ".join(content.split())) for role, content in said])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _readable(
    kept: list[_Kept], verifier: RunningVerifier, drop: bool, summary: Summary
) -> list[_Kept]:
    """Drop problems whose answer the verifier cannot parse; an error unless `drop`."""
    bad: set[int] = set()
    for start, part in _chunks("answers read", kept):
        bad |= {start + i for i in verifier.unusable([k.problem for k in part])}
    if bad and not drop:
        named = ", ".join(f"{kept[i].where}: {kept[i].answer[:60]!r}" for i in sorted(bad)[:5])
        raise DataError(
            f"the verifier cannot read {len(bad)} of {len(kept)} answers ({named}); correct the "
            "rows, or leave them out with --drop-unparsable"
        )
    summary.unparsable = len(bad)
    return [k for i, k in enumerate(kept) if i not in bad]


def _unanimous(kept: list[_Kept], verifier: RunningVerifier, summary: Summary) -> list[_Kept]:
    """Drop problems whose rows have answers of different value."""
    pairs = [(k, other) for k in kept for other in sorted(k.other_answers)]
    equal = verifier.same_answers([(k.problem, k.answer, other) for k, other in pairs])
    conflicting = {id(k) for (k, _), is_equal in zip(pairs, equal) if not is_equal}
    summary.conflicting = len(conflicting)
    return [k for k in kept if id(k) not in conflicting]


def _rendered(
    kept: list[_Kept],
    render: Callable[..., str],
    encode: Callable[[str], Sequence[int]],
    summary: Summary,
) -> Iterator[Problem]:
    """Yield the problems in the template, without those that are too long."""
    for _, part in _chunks("prompts", kept):
        for k in part:
            try:
                prompt = render(k.prompt, k.earlier)
            except DataError as error:
                raise DataError(f"{k.where}: the prompt {error}") from None
            length = len(encode(prompt))
            if not length:
                raise DataError(
                    f"{k.where}: the tokenizer makes no token of {prompt[:60]!r}; remove the row, "
                    "or give the model's own --tokenizer"
                )
            if length > summary.max_prompt_tokens:
                summary.too_long += 1
                continue
            summary.longest_prompt_tokens = max(summary.longest_prompt_tokens, length)
            yield Problem(prompt, k.answer)


def _chunks(title: str, kept: list[_Kept]) -> Iterator[tuple[int, list[_Kept]]]:
    with ProgressBar(title) as bar:
        for start in range(0, len(kept), _CHUNK):
            part = kept[start : start + _CHUNK]
            yield start, part
            bar.show(start + len(part), len(kept))


def _write(out: Path, problems: Sequence[Problem], summary: Summary) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(
        {"prompt": [p.prompt for p in problems], "answer": [p.answer for p in problems]}
    )
    about = json.dumps(dataclasses.asdict(summary)).encode()
    table = table.replace_schema_metadata({METADATA_KEY: about})
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as file:
        pyarrow.parquet.write_table(table, file)
