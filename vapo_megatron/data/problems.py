"""Reads problems (a prompt, its answer, other columns) from JSONL and parquet files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.data.chat import Render, encodable, read_prompt
from vapo_megatron.data.ground_truths import answer_text
from vapo_megatron.data.parquet import own_digits
from vapo_megatron.errors import DataError


@dataclasses.dataclass(frozen=True)
class Problem:
    """One row of a data set."""

    prompt: str
    """What the model is given; of chat messages, the text that the tokenizer's template makes."""
    answer: str = ""
    """Ground truth; empty where the data have none."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """The row's other columns."""
    source: str | None = None
    """The name of its file in data.sources or evaluation.sources; None: there is one file."""
    critic_prompt: str | None = None
    """What the critic is given in place of the prompt; None: the prompt."""
    response: str | array[int] | None = dataclasses.field(default=None, hash=False)
    """What is trained on, a text or token ids; None: responses are sampled."""

    @property
    def verifier(self) -> str | None:
        """The name of the verifier that judges it: the row's column `verifier`; None: the run's."""
        name = self.metadata.get("verifier")
        return None if name is None else str(name)

    def judged_by(self, verifier: str) -> Problem:
        """Return the problem as if its row had named this verifier."""
        return dataclasses.replace(self, metadata={**self.metadata, "verifier": verifier})


def load_problems(
    path: str | Path,
    prompt_column: str = "prompt",
    answer_column: str | None = "answer",
    *,
    critic_prompt_column: str | None = None,
    response_column: str | None = None,
    section: str = "data",
    source: str | None = None,
    verifier: str | None = None,
    render: Render | None = None,
    unreadable: dict[int, str] | None = None,
) -> list[Problem]:
    """Read all rows of a `.jsonl` or `.parquet` file in order, duplicates included.

    Args:
        path: the file.
        prompt_column: of texts, or lists of chat messages, which become texts.
        answer_column: of values that become texts, see answer_text; None: no ground truth.
        critic_prompt_column: as prompt_column, for the critic alone; None: it has no prompt of its
            own. The column also stays in the metadata.
        response_column: of texts, or lists of token ids; None: responses are sampled.
        section: data or evaluation, whose sources have the file.
        source: the file's name there; None: the columns are data's own.
        verifier: of the rows that name none.
        render: makes a text of chat messages; None: they are refused.
        unreadable: is given index -> what is wrong of problems whose answer has no text, which
            becomes empty; None: they are refused.

    Raises:
        DataError: names the file, the line (from 1) or row (from 0), what is wrong and the remedy.
    """
    path = _data_file(Path(path))
    section = "data" if source is None else f"{section}.sources.{source}"
    _check_distinct(section, prompt_column, answer_column)
    given = prompt_column, answer_column, critic_prompt_column
    names = "prompt_column", "answer_column", "critic_prompt_column"
    columns = {f"{section}.{name}": c for name, c in zip(names, given) if c is not None}
    # One column for all files.
    columns |= {} if response_column is None else {"data.response_column": response_column}
    problems: list[Problem] = []
    try:
        # The row loses prompt and answer and stays as the problem's metadata.
        for where, row in _rows(path, columns):
            # First, since their columns may be the prompt's or the answer's, which the row loses.
            response = _response(row, response_column, where)
            critic_prompt = None
            if critic_prompt_column is not None:
                critic_prompt = rendered_prompt(row, critic_prompt_column, where, render)
            prompt = rendered_prompt(row, prompt_column, where, render)
            del row[prompt_column]
            try:
                answer = _answer(row, answer_column, where)
            except DataError as error:
                if unreadable is None:
                    raise DataError(f"{error}, or set data.skip_unusable=true") from None
                answer, unreadable[len(problems)] = "", f"cannot be read: {error}"
            if verifier is not None and row.get("verifier") is None:
                row["verifier"] = verifier
            if response_column is not None:
                row.pop(response_column, None)  # It may have been the answer's.
            problems.append(Problem(prompt, answer, row, source, critic_prompt, response))
    except OSError as error:
        raise DataError(
            f"data file {path} cannot be read: {error.strerror}; make it readable, or give another"
        ) from None
    if not problems:
        raise DataError(f"data file {path} has no problems; give a file with at least one row")
    return problems


def _check_distinct(section: str, prompt_column: str, answer_column: str | None) -> None:
    if prompt_column == answer_column:
        raise DataError(
            f"{section}.answer_column={answer_column} must be another column than {section}."
            "prompt_column; change one of them, or set it to null for problems without a ground "
            "truth"
        )


def _data_file(path: Path) -> Path:
    """Return a path. DataError: there is no file, or none of a kind that is read."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(
            f"data file {path}: files end in .jsonl or .parquet, found {path.suffix!r}; "
            "convert it with vapo prepare"
        )
    if path.is_dir():
        raise DataError(f"data file {path} is a directory; give the path of one file in it")
    if not path.is_file():
        raise DataError(f"data file {path} does not exist; give the path of an existing file")
    return path


def jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of a JSONL file; empty lines are skipped.

    Raises:
        DataError: a line is not a JSON object in UTF-8; names the line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text, parse_int=_integer, object_pairs_hook=_object)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where} is not UTF-8 ({error.reason}); save it as UTF-8"
                ) from None
            except (ValueError, RecursionError) as error:
                # Without json's own line number, which counts from this line.
                found = getattr(error, "msg", str(error))
                raise DataError(
                    f"{where} is not JSON ({found}); each line must be one JSON object"
                ) from None
            if not isinstance(row, dict):
                raise DataError(
                    f"{where} is a {type(row).__name__}; each line must be one JSON object"
                )
            yield number, row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. ValueError: a key stands twice, of which json would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key {_repeated(key for key, _ in pairs)!r} stands twice")
    return found


def _repeated(names: Iterable[str]) -> str | None:
    """Return the first name that stands more than once, or None."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


_MOST_DIGITS = 4300


def _integer(digits: str) -> int:
    """Refuse what Python refuses by default, also where a verifier lifted that for the process."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits, more than {_MOST_DIGITS}")
    return int(digits)


@contextlib.contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """Open a pyarrow.parquet.ParquetFile.

    Raises:
        DataError: two columns have one name, of which a row would keep the last; or the file is
            damaged, found on opening or by the body.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if (name := _repeated(file.schema_arrow.names)) is not None:
                raise DataError(
                    f"data file {path} has two columns {name!r}; rename or remove one of them"
                )
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"data file {path} is not a readable parquet file ({' '.join(str(error).split())}); "
            "write it again"
        ) from None


def file_rows(
    path: Path, columns: Sequence[str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line or row, columns) of a JSONL or parquet file; columns: of parquet."""
    if path.suffix == ".jsonl":
        for number, row in jsonl_rows(path):
            yield f"{path}, line {number}", row
        return
    number = 0
    with parquet_file(path) as file:
        for batch in file.iter_batches(batch_size=4096, columns=columns and list(columns)):
            for row in own_digits(batch):
                yield f"{path}, row {number}", row
                number += 1


def _rows(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix == ".parquet":
        with parquet_file(path) as file:
            _check_columns(columns, file.schema_arrow.names, str(path))
    for where, row in file_rows(path):
        _check_columns(columns, row, where)
        yield where, row


def _check_columns(columns: Mapping[str, str], present: Iterable[str], where: str) -> None:
    for field, column in columns.items():
        if column not in present:
            others = ", ".join(present) or "none"
            without = ", or to null for problems without a ground truth"
            raise DataError(
                f"{where} has no column {column!r}; set {field} to one of those it has: {others}"
                + (without if field.endswith(".answer_column") else "")
            )


def rendered_prompt(row: Mapping[str, Any], column: str, where: str, render: Render | None) -> str:
    """Return the text of a row's prompt; see load_problems. DataError: `where` names the row."""
    if render is None and isinstance(row[column], list):
        return prompt_text(row[column], column, where)
    messages, options = read_prompt(row, column, where)
    if messages is None or render is None:
        return prompt_text(row[column] if messages is None else messages, column, where)
    try:
        return render(messages, **options)
    except DataError as error:
        raise DataError(
            f"{where}: {column} has chat messages, but {error}; correct or remove the row, use the "
            "tokenizer of a chat model, or make all prompts texts"
        ) from None


def _answer(row: dict[str, Any], column: str | None, where: str) -> str:
    """Take the ground truth out of a row. DataError: it has no text."""
    return "" if column is None else answer_text(row.pop(column), column, where)


def _response(row: Mapping[str, Any], column: str | None, where: str) -> str | array[int] | None:
    """Return a row's response. DataError: it is neither a text nor token ids, or is empty."""
    if column is None:
        return None
    value = row[column]
    if isinstance(value, str) and value:
        return encodable(value, column, where)
    if isinstance(value, list) and value and all(type(number) is int for number in value):
        with contextlib.suppress(OverflowError):
            return array("i", value)
    found = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
    raise DataError(
        f"{where}: {column}={found} must be a response, a non-empty text or a non-empty list of "
        "token ids; correct or remove the row"
    )


def prompt_text(value: Any, column: str, where: str) -> str:
    """Return a prompt. DataError: it is not a non-empty string; `where` names it."""
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}: {column}={value!r} must be a non-empty string; correct it")
    return encodable(value, column, where)
