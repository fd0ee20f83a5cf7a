"""The file of an evaluation and its parts: killed anywhere, gone on with, foreign, locked.

Not exercised: a file system that nodes share.
"""

import json

import pytest

from vapo_megatron.config import VapoConfig
from vapo_megatron.data.problems import Problem
from vapo_megatron.data.storage import append
from vapo_megatron.errors import DataError
from vapo_megatron.rollout.evaluation.samples_file import (
    begin_parts,
    collect,
    lock_file,
    part_of,
    verdict_settings,
    weights_digest,
)
from vapo_megatron.rollout.evaluation.statistics import problem_values

HEADER = {"checkpoint": "here", "weights": "w", "data": "there", "samples": 2, "seed": 0}


def line(index, statuses=("correct", "wrong")):
    responses = [
        {"sample": i, "status": s, "answer": "1", "vote": i, "num_tokens": 3, "truncated": False,
         "text": "t\u00e9\n"}
        for i, s in enumerate(statuses)
    ]  # fmt: skip
    return {"prompt_index": index, "prompt": "p", "answer": "1", "responses": responses}


VALUES = problem_values(line(0)["responses"])


def write(path, indices, header=HEADER):
    """A file or part that holds these problems."""
    text = json.dumps({"evaluation": 1, **header}) + "\n"
    path.write_text(text + "".join(json.dumps(line(i)) + "\n" for i in indices))


def test_parts_become_one_file_in_the_order_of_the_problems(tmp_path):
    out = tmp_path / "deep" / "a.jsonl"
    with lock_file(out):
        assert collect(out, HEADER) == {}
        begin_parts(out, HEADER, 2)
        for replica, indices in ((0, [0, 10]), (1, [9, 2])):
            with part_of(out, replica).open("ab") as part:
                for index in indices:
                    append(part, [line(index)])
        assert list(collect(out, HEADER).items()) == [(i, VALUES) for i in (0, 2, 9, 10)]
    header, *lines = map(json.loads, out.read_text().splitlines())
    assert header == {"evaluation": 1, **HEADER} and lines == [line(i) for i in (0, 2, 9, 10)]
    assert sorted(p.name for p in out.parent.iterdir()) == ["a.jsonl"]
    # What another number of replicas adds; one of them wrote what the file has already, as a kill
    # between putting together and removing leaves it.
    write(part_of(out, 0), [1])
    write(part_of(out, 5), [9, 3])
    assert list(collect(out, HEADER)) == [0, 1, 2, 3, 9, 10]
    assert [json.loads(text)["prompt_index"] for text in out.read_text().splitlines()[1:]] == [
        0, 1, 2, 3, 9, 10,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.part0000"])
def test_what_a_refused_evaluation_leaves_is_in_nobodys_way(tmp_path, name):
    """Its header, and no problem."""
    write(tmp_path / name, [], {**HEADER, "samples": 99})
    assert collect(tmp_path / "a.jsonl", HEADER) == {}
    write(tmp_path / "a.jsonl.part0001", [2])
    assert list(collect(tmp_path / "a.jsonl", HEADER)) == [2]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.part0000"])
def test_whatever_is_cut_at_any_byte_goes_on(tmp_path, name):
    write(tmp_path / "whole", range(3))
    content = (tmp_path / "whole").read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    out = tmp_path / "a.jsonl"
    for cut in {0, 1, *ends, *(e - 1 for e in ends), *(e + 5 for e in ends[:-1])}:
        (tmp_path / name).write_bytes(content[:cut])
        complete = max(0, sum(e <= cut for e in ends) - 1)
        assert collect(out, HEADER) == {i: VALUES for i in range(complete)}, cut
        assert out.read_bytes() == content[: ends[complete]]
        write(part_of(out, 0), range(complete, 3))
        assert collect(out, HEADER) == {i: VALUES for i in range(3)}
        assert out.read_bytes() == content, cut
        out.unlink()


def test_a_whole_file_is_left_alone(tmp_path):
    out = tmp_path / "a.jsonl"
    write(out, range(3))
    before = out.stat()
    assert len(collect(out, HEADER)) == 3
    assert (out.stat().st_ino, out.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.part0003"])
def test_another_evaluation_is_refused_but_not_another_place(tmp_path, name):
    out, path = tmp_path / "a.jsonl", tmp_path / name
    for key, value in (("weights", "x"), ("samples", 3), ("seed", 1), ("top_p", 0.7)):
        write(path, [0])
        before = path.read_bytes()
        with pytest.raises(
            DataError,
            match=f"{name} is of another evaluation: its {key} is .* {value!r}; give another --out",
        ):
            collect(out, {**HEADER, key: value})
        assert path.read_bytes() == before
    collect(out, {**HEADER, "checkpoint": "moved", "data": "moved"})
    assert out.exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.part0000"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "p"}\n', "is not an evaluation's file; give another --out"),
        ("[]\n", "is not an evaluation's file"),
        ("something important", "is not an evaluation's file"),
        ("nonsense\n", "line 1 was not written by an evaluation"),
        ("HEADER[1]\n", "line 2 was not"),
        ('HEADER{"prompt_index": 1}\n', "line 2 was not"),
        ('HEADER{"prompt_index": 1, "responses": []}\n', "line 2 was not"),
        ('HEADER{"prompt_index": 1, "responses": [{}, {}]}\n', "line 2 was not"),
        (f"HEADER{json.dumps({**line(0), 'prompt_index': 'x'})}\n", "line 2 was not"),
        (f"HEADER{json.dumps(line(0))}\n{json.dumps(line(1, ('wrong',)))}\n", "line 3 was not"),
    ],
)
def test_foreign_files_are_left_alone(tmp_path, text, message, name):
    path = tmp_path / name
    text = text.replace("HEADER", json.dumps({"evaluation": 1, **HEADER}) + "\n")
    path.write_text(text)
    with pytest.raises(DataError, match=f"{name}.* {message}"):
        collect(tmp_path / "a.jsonl", HEADER)
    assert path.read_text() == text and [p.name for p in tmp_path.iterdir()] == [name]


def test_two_at_once_are_refused(tmp_path):
    out = tmp_path / "a.jsonl"
    with lock_file(out):
        with pytest.raises(DataError, match="being written by another evaluation"):
            with lock_file(out):
                pass
    with lock_file(out):
        pass


def test_weights_are_told_apart_by_content(tmp_path):
    files = {"model.safetensors": bytes(5_000_000), "config.json": b"{}", "README.md": b"x"}
    for copy in ("a", "b"):
        (tmp_path / copy).mkdir()
        for name, content in files.items():
            (tmp_path / copy / name).write_bytes(content)
    first, second = tmp_path / "a", tmp_path / "b"
    assert weights_digest(first) == weights_digest(second)
    (second / "README.md").write_bytes(b"y")
    assert weights_digest(first) == weights_digest(second)
    for name, content in (
        ("config.json", b"{ }"),
        ("model.safetensors", bytes(5_000_001)),
        ("model.safetensors", b"\1" * 5_000_000),
        ("other.safetensors", b""),
    ):
        before = (second / name).read_bytes() if (second / name).exists() else None
        (second / name).write_bytes(content)
        assert weights_digest(first) != weights_digest(second), name
        (second / name).unlink() if before is None else (second / name).write_bytes(before)


def test_a_column_that_no_judging_reads_is_not_in_the_header():
    reward = VapoConfig().reward
    own = VapoConfig(reward={"verifier": "package:Class"}).reward
    first, second = ([Problem("p", "1", {"level": level})] for level in (0, "hard"))
    assert verdict_settings(reward, first) == verdict_settings(reward, second)
    assert verdict_settings(own, first) != verdict_settings(own, second)
