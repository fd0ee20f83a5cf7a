"""The JSONL file of an evaluation: a header that identifies it, then one problem per line.

    {"evaluation": 1, "checkpoint": ..., "weights": ..., "problems": ..., "samples": 32, ...}
    {"prompt_index": 0, "prompt": ..., "answer": ..., "verifier": ..., "responses": [{...}, ...]}

While it runs, the first rank of each replica appends problems to its part, FILE.part0000 and so on,
which starts with the same header. `collect` merges the parts into one file ordered by problem: at
the end, and when an evaluation resumes, possibly with another number of replicas.
"""

from __future__ import annotations

import contextlib
import datetime
import glob
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.config import RewardConfig
from vapo_megatron.data.lock import locked
from vapo_megatron.data.problems import Problem, jsonl_rows
from vapo_megatron.data.storage import replacing, to_line
from vapo_megatron.errors import DataError
from vapo_megatron.reward.columns import columns_read
from vapo_megatron.rollout.evaluation.statistics import problem_values

FORMAT = 1
OF_PLACE = ("checkpoint", "step", "data")
"""Not compared: the same weights and problems may have moved when the evaluation resumes."""
_OF_VERDICTS = {"verifier", "verifiers", "hybrid", "from_score", "correct_from", "scales"}
"""Fields of reward that decide what a verdict is."""
_PIECES, _PIECE_BYTES = 64, 4096

Summarize = Callable[[Mapping[str, Any]], Any]
"""A problem's line to what is kept of it; raises KeyError, TypeError or ValueError where it is not
an evaluation's."""

_Found = tuple[Path, int, Any]
"""A problem's file, where its line begins there, and what is kept of it."""


def line_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return problem_values of a line's responses."""
    return problem_values(line["responses"])


def noted_date(out: Path | None) -> str | None:
    """Return the date in the prompts of a file's header; None: there is no such file or date."""
    if out is None:
        return None
    try:
        with out.open("rb") as file:
            date = json.loads(file.readline())["date"]
        return datetime.date.fromisoformat(date).isoformat()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def lock_file(out: Path) -> contextlib.AbstractContextManager[None]:
    """Lock a file, and create its directory; DataError: another evaluation has the lock."""
    return locked(
        out.with_name(f".{out.name}.lock"),
        f"{out} is being written by another evaluation; wait for it, or give another --out",
    )


def collect(
    out: Path, header: Mapping[str, Any], summarize: Summarize = line_values
) -> dict[int, Any]:
    """Merge the file and its parts, which are removed; a complete file stays untouched.

    A partial last line, left by a kill, is dropped, and so is a header without problems, of
    whatever evaluation: one that was refused leaves it. Only one line at a time is in memory.

    Args:
        out: created with the header if it is missing.
        header: identifies the evaluation; JSON values.
        summarize: what to return of a problem.

    Returns:
        prompt_index -> the result of summarize, in the order of the problems.

    Raises:
        DataError: the file or a part is not of this evaluation.
    """
    header = {"evaluation": FORMAT, **header}
    parts = sorted(out.parent.glob(f"{glob.escape(out.name)}.part*"))
    found: dict[int, _Found] = {}
    is_complete = out.exists() and not parts and _has_problems(out)
    for path in filter(_has_problems, [out, *parts] if out.exists() else parts):
        end = _read(path, header, summarize, found)
        is_complete = is_complete and 0 < end == path.stat().st_size
    if not is_complete:
        _write(out, header, [found[index][:2] for index in sorted(found)])
        for part in parts:
            part.unlink()
    return {index: found[index][2] for index in sorted(found)}


def begin_parts(out: Path, header: Mapping[str, Any], count: int) -> None:
    """Write the header of each replica's part."""
    for number in range(count):
        part_of(out, number).write_bytes(to_line({"evaluation": FORMAT, **header}).encode())


def part_of(out: Path, replica: int) -> Path:
    """Return the path of a replica's part."""
    return out.with_name(f"{out.name}.part{replica:04}")


def read_samples(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a file's header and its problems' lines, whatever evaluation or selection it is of.

    Raises:
        DataError: it is not such a file, or was not finished.
    """
    if not path.is_file():
        raise DataError(f"samples file {path} does not exist; give one that vapo evaluate wrote")
    lines = [line for _, line in jsonl_rows(path)]
    if not lines or "evaluation" not in lines[0]:
        raise DataError(f"{path} is not an evaluation's file; give one that vapo evaluate wrote")
    if any(path.parent.glob(f"{glob.escape(path.name)}.part*")):
        raise DataError(f"{path} is not finished; let the evaluation end, or run it again")
    header, *problems = lines
    for number, line in enumerate(problems, 2):
        if not {"prompt_index", "answer", "verifier", "responses"} <= set(line):
            raise DataError(f"{path}, line {number} was not written by an evaluation; remove it")
    return header, problems


def _has_problems(path: Path) -> bool:
    """Return whether a file holds anything but an evaluation's header."""
    with path.open("rb") as file:
        first, more = file.readline(), file.read(1)
    try:
        content = None if more else json.loads(first)
    except ValueError:
        return True
    return not (isinstance(content, dict) and "evaluation" in content)


def _read(
    path: Path, header: dict[str, Any], summarize: Summarize, found: dict[int, _Found]
) -> int:
    """Add what a file holds to `found`; return where its last complete line ends.

    Raises:
        DataError: a line was not written by an evaluation with this header.
    """
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                if number == 1 and not to_line(header).encode().startswith(line):
                    raise _foreign(path)
                break
            begin, end = end, end + len(line)
            try:
                content = json.loads(line)
                if number == 1:
                    _compare(path, content, header)
                    continue
                index = content["prompt_index"]
                assert isinstance(index, int)
                assert len(content["responses"]) == header["samples"]
                found[index] = path, begin, summarize(content)
            except DataError:
                raise
            except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
                raise DataError(
                    f"{path}, line {number} was not written by an evaluation; remove the line, or "
                    "give another --out"
                ) from None
    return end


def _foreign(path: Path) -> DataError:
    return DataError(f"{path} is not an evaluation's file; give another --out")


def _compare(path: Path, found: Any, header: dict[str, Any]) -> None:
    if not isinstance(found, dict) or "evaluation" not in found:
        raise _foreign(path)
    for name, value in header.items():
        if name not in OF_PLACE and found.get(name) != value:
            raise DataError(
                f"{path} is of another evaluation: its {name} is {found.get(name)!r}, here it is "
                f"{value!r}; give another --out, or remove the file to start over"
            )


def _write(out: Path, header: dict[str, Any], lines: Sequence[tuple[Path, int]]) -> None:
    """Atomically replace the file with the header and the lines that start at these offsets."""
    with contextlib.ExitStack() as stack:
        sources = {path: stack.enter_context(path.open("rb")) for path in {p for p, _ in lines}}
        target = stack.enter_context(replacing(out))
        target.write(to_line(header).encode())
        for path, begin in lines:
            sources[path].seek(begin)
            target.write(sources[path].readline())


def verdict_settings(reward: RewardConfig, rows: Sequence[Problem]) -> dict[str, Any]:
    """Return what a header says of the verdicts, which are kept with the responses.

    Args:
        reward: the verifiers, with their options.
        rows: the problems; only their columns that judging reads count, see reward/columns.py.
    """
    digest = hashlib.sha256()
    for row in rows:
        read = {name: row.metadata[name] for name in columns_read(row, reward)}
        digest.update(json.dumps(read, sort_keys=True, default=repr).encode() + b"\n")
    return {"reward": reward.model_dump(include=_OF_VERDICTS), "columns": digest.hexdigest()[:16]}


def weights_digest(hf_path: Path) -> str:
    """Identify the weights, configuration and tokenizer of an HF directory by their contents.

    Hashes each file's size and 64 evenly spaced pieces of 4 KiB: an optimizer step changes all of
    them, and large directories stay cheap.
    """
    digest = hashlib.sha256()
    for path in sorted(hf_path.iterdir()):
        if path.suffix in (".safetensors", ".json", ".model", ".txt", ".jinja"):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            step = max(_PIECE_BYTES, -(-size // _PIECES))
            with path.open("rb") as file:
                for start in range(0, size, step):
                    file.seek(start)
                    digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:16]
