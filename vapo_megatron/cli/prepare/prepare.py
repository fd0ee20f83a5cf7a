"""Converts published data sets to training data: deduplicated, in one prompt template, checked.

Rows are streamed; memory holds each distinct problem once.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.cli.prepare.columns import (
    ANSWER_PREFIX,
    ANSWER_SUFFIX,
    NoAnswer,
    Shape,
    choose_shape,
    read_problem,
    strip_instructions,
)
from vapo_megatron.cli.prepare.rows import ALL, Choose, count_rows, find_file, read_rows
from vapo_megatron.cli.prepare.solutions import Solved, solution_responses, unsolved
from vapo_megatron.cli.prepare.summary import Summary, Template
from vapo_megatron.data.chat import OPTION_COLUMNS, Message, template_options
from vapo_megatron.data.ground_truths import members
from vapo_megatron.data.parquet import storable_array, write_table
from vapo_megatron.data.problems import Problem
from vapo_megatron.data.prompts import without_second_begin
from vapo_megatron.errors import DataError
from vapo_megatron.reward.hybrid import is_prose
from vapo_megatron.reward.verifier import RunningVerifier
from vapo_megatron.rollout.special_tokens import begin_of
from vapo_megatron.rollout.tokenizer import ChatTemplate

METADATA_KEY = b"vapo_megatron.prepare"
"""Key of the summary, as JSON, in the parquet file's metadata."""
_CHUNK = 1000
"""Problems between two updates of the progress bar."""


@dataclasses.dataclass
class _Kept:
    """The first row of a problem, and the different answers of later rows."""

    where: str
    prompt: str
    """The text, or the last message's; its instructions are gone unless the template keeps them."""
    answer: str
    earlier: tuple[Message, ...]
    options: dict[str, Any]
    """For the chat template, see template_options; the prompt that is written has them."""
    others: dict[str, Any]
    """The row's other columns."""
    other_answers: set[str] = dataclasses.field(default_factory=set)
    solutions: list[str] = dataclasses.field(default_factory=list)
    """Responses that solve the problem, to be run against its tests."""

    @property
    def problem(self) -> Problem:
        return Problem(self.prompt, self.answer)

    @property
    def is_for_math(self) -> bool:
        """Whether the answer is there, and the row is for no other verifier."""
        is_named = self.others.get("verifier") in (None, "math")
        return bool(self.answer) and is_named and not self.solutions


def prepare(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: Any,
    verifier: RunningVerifier,
    template: Template = "answer",
    max_prompt_tokens: int = 2048,
    choose: Choose = choose_shape,
    skip_unusable: bool = False,
    needs_answers: bool = True,
    dropped: Collection[str] = (),
    solution_column: str | None = None,
    code_verifier: RunningVerifier | None = None,
    overwrite: bool = False,
    made: Callable[[Summary], Iterator[tuple[Shape, str, dict[str, Any]]]] | None = None,
) -> Summary:
    """Write a parquet file with the columns `prompt` and `answer`, and the rows' other columns.

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
        skip_unusable: leave out rows whose answer is missing or refused, instead of an error.
        needs_answers: refuse rows without an answer; they are written with null.
        dropped: other columns that are not written; ALL: none is.
        solution_column: of reference solutions, which must pass their rows' tests; see
            solutions.py. None: nothing is run.
        code_verifier: `code`, which runs them; given with solution_column.
        overwrite: replace out.
        made: yields (shape, where, row) in place of sources, and counts the rows.

    Raises:
        DataError: names the file, the line or row, the problem and the remedy.
    """
    _check_options(out, max_prompt_tokens, overwrite, dropped, solution_column)
    render = make_template(template, tokenizer)
    summary = Summary([], template, max_prompt_tokens)
    paths = [find_file(source) for source in sources]
    unread = [name for name in dropped if name != solution_column]
    read = functools.partial(made or functools.partial(_rows, paths, choose, unread), summary)
    kept = _distinct(
        read, template, summary, needs_answers=needs_answers, skip=skip_unusable,
        solution_column=solution_column, dropped=dropped,
    )  # fmt: skip
    kept = _readable(kept, verifier, skip_unusable, summary)
    kept = _unanimous(kept, verifier, summary)
    if template != "none":
        _check_not_rendered(kept, tokenizer)
    kept = list(_rendered(kept, render, tokenizer.encode, begin_of(tokenizer), summary))
    if solution_column is not None and code_verifier is not None:
        kept = _solved(kept, code_verifier, solution_column, skip_unusable, summary)
    if not kept:
        raise DataError(summary.nothing_left())
    summary.written = len(kept)
    summary.without_answer = sum(not k.answer for k in kept)
    prose = [k for k in kept if k.is_for_math and is_prose(k.answer)]
    if prose:
        summary.prose, first = len(prose), prose[0]
        summary.prose_example = f"{first.where}: {first.answer!r:.80}"
    summary.first_prompt = _as_read(tokenizer, kept[0].prompt)
    _write(out, kept, summary)
    return summary


def _check_options(
    out: Path,
    max_prompt_tokens: int,
    overwrite: bool,
    dropped: Collection[str],
    solution_column: str | None,
) -> None:
    if out.suffix != ".parquet":
        raise DataError(f"--out={out} must end in .parquet")
    if max_prompt_tokens < 1:
        raise DataError(f"--max-prompt-tokens={max_prompt_tokens} must be at least 1")
    if out.exists() and not overwrite:
        raise DataError(f"--out={out} exists; give another file, or --overwrite")
    if solution_column is not None and ALL in dropped:
        raise DataError(
            f"--drop-columns {ALL} leaves no tests for --solution-column {solution_column}; name "
            "the columns to leave out"
        )


def make_template(name: Template, tokenizer: Any) -> Callable[..., str]:
    """Return a function that formats a problem, and the messages before it, as a prompt.

    Templates: see prepare.

    Raises:
        DataError: here or when called: the tokenizer has no chat template, it refuses the messages,
            its text would be encoded to other ids, or the template has no place for them.
    """
    as_chat = ChatTemplate(tokenizer)

    def render(problem: str, earlier: Sequence[Message] = (), **options: Any) -> str:
        what = "messages before the problem" if earlier else "tools or chat_template_kwargs"
        if name == "none" and not (earlier or options):
            return problem
        if name == "answer" and (earlier or options):
            raise DataError(
                f"has {what}, for which --template answer has no place; give --template chat"
            )
        text = problem if name == "none" else f"{ANSWER_PREFIX}{problem}{ANSWER_SUFFIX}"
        if name == "answer":
            return f"{text}\n"
        try:
            return as_chat([*earlier, {"role": "user", "content": text}], **options)
        except DataError as error:
            raise DataError(
                f"has {what}, but {error}; remove the row, or give another --tokenizer"
            ) from None

    if name == "chat":
        try:
            as_chat([{"role": "user", "content": "1 + 1"}])
        except DataError as error:
            raise DataError(
                f"--template=chat: {error}; give --template answer, or --template none for prompts "
                "that are complete as they are"
            ) from None
    return render


def _rows(
    paths: Sequence[Path], choose: Choose, dropped: Collection[str], summary: Summary
) -> Iterator[tuple[Shape, str, dict[str, Any]]]:
    """Yield (shape, where, row) of all files, and count them."""
    seen = {ALL}
    for path in paths:
        shape, rows = read_rows(path, choose, dropped, seen)
        count, total = 0, count_rows(path)
        with ProgressBar(f"rows of {path.name}") as bar:
            for count, (where, row) in enumerate(rows, start=1):
                yield shape, where, row
                if count % _CHUNK == 0 or count == total:
                    bar.show(count, total)
        if not count:
            raise DataError(f"data file {path} holds no rows; give a file with at least one")
        summary.files.append({"file": str(path), "shape": shape.name, "rows": count})
        summary.rows += count
    if absent := [name for name in dropped if name not in seen]:
        raise DataError(
            f"--drop-columns {' '.join(absent)}: no file has such a column; there are "
            f"{', '.join(sorted(seen - {ALL}))}"
        )


def _distinct(
    rows: Callable[[], Iterator[tuple[Shape, str, dict[str, Any]]]],
    template: Template,
    summary: Summary,
    *,
    needs_answers: bool,
    skip: bool,
    solution_column: str | None,
    dropped: Collection[str],
) -> list[_Kept]:
    """Return the first row of each problem, in order, with the other answers that it has."""
    first: dict[bytes, _Kept] = {}
    for shape, where, row in rows():
        solution = row.get(solution_column) if solution_column else None
        # Of a problem of mathematics, a solution is no program.
        if row.get("verifier") not in (None, "code"):
            solution = None
        is_for_other = row.get("verifier") not in (None, "math") or bool(solution)
        try:
            problem = read_problem(
                shape, row, where, needs_answers=needs_answers and not is_for_other
            )
        except NoAnswer as error:
            if not skip:
                raise
            summary.unusable += 1
            summary.unusable_example = summary.unusable_example or str(error)
            continue
        bare = strip_instructions(problem.prompt)
        prompt = problem.prompt if template == "none" else bare
        options = template_options(row, where)
        used = {*shape.columns, "prompt", "answer", *OPTION_COLUMNS, *dropped}
        others = {k: v for k, v in row.items() if k not in used}
        solutions = solution_responses(solution, problem.prompt) if solution else []
        new = _Kept(
            where, prompt, problem.answer, problem.earlier, options, others, solutions=solutions
        )
        known = first.setdefault(_key(bare, problem.earlier, options), new)
        if known.answer != new.answer:
            known.other_answers.add(new.answer)
    summary.duplicates = summary.rows - len(first) - summary.unusable
    return list(first.values())


def _key(problem: str, earlier: Sequence[Message], options: Mapping[str, Any]) -> bytes:
    """Hash all that makes a prompt, ignoring differences in the messages' whitespace."""
    said = [{"role": "user", "content": problem}, *earlier]
    said = [{**message, "content": " ".join(message["content"].split())} for message in said]
    text = json.dumps([said, dict(options)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _readable(
    kept: list[_Kept], verifier: RunningVerifier, skip: bool, summary: Summary
) -> list[_Kept]:
    """Drop problems whose answer the verifier refuses; an error unless `skip`."""
    bad: dict[int, str] = {}
    for start, part in _chunks("answers read", kept):
        asked = [i for i, k in enumerate(part, start) if k.is_for_math]
        found = verifier.unusable([kept[i].problem for i in asked])
        bad |= {asked[i]: reason for i, reason in found.items()}
    named = [f"{kept[i].where} {bad[i]}" for i in sorted(bad)[:5]]
    if bad and not skip:
        raise DataError(
            f"the verifier cannot use {len(bad)} of {len(kept)} answers ({'; '.join(named)}); "
            "correct the rows, or leave them out with --skip-unusable"
        )
    summary.unusable += len(bad)
    summary.unusable_example = summary.unusable_example or "".join(named[:1])
    good = [k for i, k in enumerate(kept) if i not in bad]
    for k in good:
        if k.is_for_math and len(found_in := members(k.answer)) == 1:
            k.answer = found_in[0]
    return good


def _unanimous(kept: list[_Kept], verifier: RunningVerifier, summary: Summary) -> list[_Kept]:
    """Drop problems whose rows have answers of different value."""
    others = [(k, other) for k in kept for other in sorted(k.other_answers)]
    conflicting = {id(k) for k, _ in others if not k.is_for_math}
    pairs = [(k, other) for k, other in others if k.is_for_math]
    equal = verifier.same_answers([(k.problem, k.answer, other) for k, other in pairs])
    conflicting |= {id(k) for (k, _), is_equal in zip(pairs, equal) if not is_equal}
    summary.conflicting = len(conflicting)
    return [k for k in kept if id(k) not in conflicting]


def _solved(
    kept: list[_Kept], verifier: RunningVerifier, column: str, skip: bool, summary: Summary
) -> list[_Kept]:
    """Drop problems whose own solutions do not pass their tests; an error unless `skip`."""
    asked = [k for k in kept if k.solutions]
    solved = [Solved(k.where, Problem(k.prompt, k.answer, k.others), k.solutions) for k in asked]
    bad = {id(asked[i]) for i in unsolved(solved, verifier, column, skip, summary)}
    return [k for k in kept if id(k) not in bad]


def _check_not_rendered(kept: Sequence[_Kept], tokenizer: Any) -> None:
    """Refuse prompts of which most have special tokens: they are in a chat template already."""
    special = [token for token in tokenizer.all_special_tokens if len(token) > 2]
    found = [(k, t) for k in kept if (t := next((t for t in special if t in k.prompt), None))]
    if found and len(found) * 2 > len(kept):
        k, token = found[0]
        raise DataError(
            f"{len(found)} of {len(kept)} prompts have special tokens of the tokenizer, such as "
            f"{token!r} in {k.where}: they are complete as they are; give --template none"
        )


def _rendered(
    kept: list[_Kept],
    render: Callable[..., str],
    encode: Callable[[str], list[int]],
    begin: list[int],
    summary: Summary,
) -> Iterator[_Kept]:
    """Yield the problems with their prompts in the template, without those that are too long."""
    for _, part in _chunks("prompts", kept):
        for k in part:
            try:
                prompt = render(k.prompt, k.earlier, **k.options)
            except DataError as error:
                raise DataError(f"{k.where}: the prompt {error}") from None
            length = len(without_second_begin(encode(prompt), begin))
            if not length:
                raise DataError(
                    f"{k.where}: the tokenizer makes no token of {prompt[:60]!r}; remove the row, "
                    "or give the model's own --tokenizer"
                )
            if length > summary.max_prompt_tokens:
                summary.too_long += 1
                continue
            summary.longest_prompt_tokens = max(summary.longest_prompt_tokens, length)
            yield dataclasses.replace(k, prompt=prompt)


def _as_read(tokenizer: Any, prompt: str) -> str:
    """Decode a prompt's ids, so that what the tokenizer adds or changes is seen; cut if long."""
    ids = without_second_begin(tokenizer.encode(prompt), begin_of(tokenizer))
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text if len(text) <= 800 else f"{text[:500]} [...] {text[-250:]}"


def _chunks(title: str, kept: list[_Kept], size: int = _CHUNK) -> Iterator[tuple[int, list[_Kept]]]:
    with ProgressBar(title) as bar:
        for start in range(0, len(kept), size):
            part = kept[start : start + size]
            yield start, part
            bar.show(start + len(part), len(kept))


def _write(out: Path, kept: Sequence[_Kept], summary: Summary) -> None:
    import pyarrow

    columns: dict[str, Any] = {
        "prompt": pyarrow.array([k.prompt for k in kept], pyarrow.string()),
        "answer": pyarrow.array([k.answer or None for k in kept], pyarrow.string()),
    }
    places = [k.where for k in kept]
    for name in dict.fromkeys(name for k in kept for name in k.others):
        try:
            values = [k.others.get(name) for k in kept]
            columns[name] = storable_array(name, values, places, "--data")
        except DataError as error:
            raise DataError(f"{error}, or leave it out with --drop-columns {name}") from None
    summary.columns = list(columns)[2:]
    write_table(out, pyarrow.table(columns), METADATA_KEY, dataclasses.asdict(summary))
