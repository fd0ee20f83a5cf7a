"""Reading rows: shapes by columns, broken lines by number, files of the Hugging Face hub.

The hub is a server on this machine that answers as the hub does. Not exercised: the real one, its
redirects and its access rules.
"""

import functools
import hashlib
import http.server
import json
import os
import threading
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.alone import printed_by
from vapo_megatron.cli.prepare.columns import SHAPES, Shape, choose_shape, read_problem
from vapo_megatron.cli.prepare.rows import count_rows, find_file, only_data_file, read_rows
from vapo_megatron.errors import DataError

ROOT = Path(__file__).resolve().parents[3]


def read(path):
    """Every row as a problem, with the shape that its columns fit."""
    shape, rows = read_rows(path, choose_shape)
    return [read_problem(shape, row, where) for where, row in rows]


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (["data_source", "prompt", "ability", "reward_model", "extra_info"], "verl"),
        (["prompt", "solution", "data_source", "source_prompt", "reward_model"], "verl"),
        (["question", "answer"], "gsm8k"),
        (["id", "problem", "solution", "answer", "url", "year"], "aime"),
        (["ID", "Problem", "Solution", "Answer"], "aime"),
        (["prompt", "answer"], "plain"),
    ],
)
def test_the_shape_is_found_from_the_columns(columns, name):
    shape = choose_shape(columns, "f")
    assert shape.name == name
    assert shape.prompt_column in columns and shape.answer_column in columns
    assert choose_shape(columns, "f", name=name) == shape


@pytest.mark.parametrize(
    ("columns", "options", "expected"),
    [
        (["messages"], {}, ("messages", "messages", None)),
        (["id", "messages", "answer"], {}, ("messages", "messages", "answer")),
        (["Conversations"], {}, ("sharegpt", "Conversations", None)),
        (["prompt", "answer", "messages"], {}, ("plain", "prompt", "answer")),
        (["prompt", "messages"], {}, ("messages", "messages", None)),
        (
            ["prompt", "answer", "messages"],
            {"name": "messages"},
            ("messages", "messages", "answer"),
        ),
        (["prompt"], {"needs_answers": False}, ("plain", "prompt", None)),
        (["question", "id"], {"needs_answers": False}, ("plain", "question", None)),
        (["a"], {"needs_answers": False, "prompt_column": "a"}, ("plain", "a", None)),
    ],
)
def test_chats_and_prompts_without_answers(columns, options, expected):
    assert choose_shape(columns, "f", **options) == Shape(*expected)


def turns(*said, names=("role", "content")):
    return [dict(zip(names, turn)) for turn in said]


@pytest.mark.parametrize(
    ("last", "answer"),
    [
        ("So it is \\boxed{42}.", "42"),
        ("Yes.\nAnswer: 1/2", "1/2"),
        ("42", "42"),
        ("$x = 3$", "$x = 3$"),
    ],
)
def test_the_last_turn_of_a_chat_is_the_answer(last, answer):
    said = [("system", "s"), ("user", "q")]
    chat = turns(*said, ("assistant", last))
    expected = ("q", answer, ({"role": "system", "content": "s"},))
    assert read_problem(SHAPES["messages"], {"messages": chat}, "f") == expected
    said = turns(("system", "s"), ("human", "q"), ("gpt", last), names=("from", "value"))
    assert read_problem(SHAPES["sharegpt"], {"conversations": said}, "f") == expected


def test_a_chat_without_an_answer_is_named():
    read = functools.partial(read_problem, SHAPES["messages"])
    row = {"messages": turns(("user", "q"), ("assistant", "It depends on the velocity."))}
    with pytest.raises(DataError, match="^f: the last message of messages, 'It dep.*no final answ"):
        read(row, "f")
    row = {"messages": turns(("user", "q"))}
    with pytest.raises(DataError, match="^f: messages=.* has no answer; .*--without-answers"):
        read(row, "f")
    assert read(row, "f", needs_answers=False) == ("q", "", ())
    with_column = Shape("messages", "messages", "answer")
    row = {"messages": turns(("user", "q"), ("assistant", "long")), "answer": 5}
    assert read_problem(with_column, row, "f") == ("q", "5", ())


def test_a_column_is_taken_as_the_file_writes_it():
    assert choose_shape(["Problem", "Answer"], "f") == Shape("aime", "Problem", "Answer")
    assert choose_shape(["Problem", "problem", "answer"], "f") == SHAPES["aime"]


@pytest.mark.parametrize(
    ("columns", "name", "message"),
    [
        (["text", "label"], None, "f: its columns fit no known shape .*gsm8k: question, answer.*"
         "it has text, label; give --prompt-column"),
        (["question", "problem", "answer"], None, "could have the shape gsm8k or aime: .*--shape"),
        (["prompt", "answer"], "gsm8k", "gsm8k needs the columns question and answer, it has "
         "prompt, answer; give another --shape"),
    ],
)  # fmt: skip
def test_columns_that_fit_nothing_or_too_much(columns, name, message):
    with pytest.raises(DataError, match=message):
        choose_shape(columns, "f", name=name)


def test_named_columns():
    named = functools.partial(choose_shape, ["a", "b"], "f", prompt_column="b")
    assert named(answer_column="a") == Shape("plain", "b", "a")
    with pytest.raises(DataError, match="belong together"):
        named()
    with pytest.raises(DataError, match="no column 'c'; give --answer-column as .*: a, b"):
        named(answer_column="c")


MESSAGE = {"role": "user", "content": "p"}
TRUTH = {"ground_truth": "1"}


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("verl", {"prompt": [MESSAGE]}, "no column 'reward_model', which the file's other rows"),
        ("verl", {"prompt": [{**MESSAGE, "role": "system"}], "reward_model": TRUTH}, "prompt has "
         "messages of system; .* the last must be the user's"),
        ("verl", {"prompt": [], "reward_model": TRUTH}, "prompt has messages of nobody"),
        ("verl", {"prompt": 5, "reward_model": TRUTH}, "prompt=5 must be a non-empty string"),
        ("plain", {"prompt": [{"role": "user"}], "answer": 1}, r"prompt\[0\]={'role': 'user'} mu"),
        ("verl", {"prompt": "p", "reward_model": "1"}, "must hold ground_truth, found '1'"),
        ("verl", {"prompt": "p", "reward_model": {"ground_truth": None}}, "has no answer"),
        ("gsm8k", {"question": "q", "answer": "72"}, "'72' has no '####'.*--prompt-column question "
         "--answer-column answer"),
        ("gsm8k", {"question": "q", "answer": "#### "}, "answer='#### ' has no answer"),
        ("aime", {"problem": "", "answer": "1"}, "problem='' must be a non-empty string"),
        ("plain", {"prompt": "p", "answer": None}, "no answer; .*--without-answers,.*--skip-"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(name, row, message):
    with pytest.raises(DataError, match=f"^f, row 3:? .*{message}"):
        read_problem(SHAPES[name], row, "f, row 3")


@pytest.mark.parametrize(("name", "answer"), [("verl", TRUTH), ("plain", "1"), ("aime", 1)])
def test_messages_of_any_shape(name, answer):
    shape, earlier = SHAPES[name], [{"role": "system", "content": "s"}, MESSAGE]
    prompt = [*earlier, {**MESSAGE, "content": "q"}]
    row = {shape.prompt_column: prompt, shape.answer_column: answer}
    assert read_problem(shape, row, "f") == ("q", "1", tuple(earlier))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,answer\np,1\np,1,2\n", "a.csv, line 3 has 3 fields, the header 2; fields with"),
        ("prompt,answer\np\n", "line 2 has 1 fields"),
        ('prompt,answer\n"p,1\n', "line 2 is not CSV"),
        ('prompt,answer\np,1\n"p"x,1\n', "line 3 is not CSV"),
        ('prompt,answer\n"two\nlines",1\np\n', "line 4 has 1 fields"),
        ("", "line 1 must name each column once, found nothing"),
        ("answer,answer\np,1\n", "line 1 must name each column once"),
        ("prompt,answer\n\n", "holds no rows"),
        ("prompt,answer\np,\n", "line 2: answer='' has no answer"),
    ],
)
def test_a_bad_csv_line_is_named(tmp_path, text, message):
    path = tmp_path / "a.csv"
    path.write_text(text, newline="")
    with pytest.raises(DataError, match=message):
        read(path)


def test_csv_with_a_byte_order_mark_and_long_fields(tmp_path):
    path = tmp_path / "a.csv"
    long = "w" * 300_000
    path.write_bytes(f'\ufeffprompt,answer\r\n"{long}",1\r\n\r\np,2\r\n'.encode())
    assert [(len(p.prompt), p.answer) for p in read(path)] == [(300_000, "1"), (1, "2")]
    path.write_bytes(b"prompt,answer\np,\xff\n")
    with pytest.raises(DataError, match="is not UTF-8"):
        read(path)


def test_a_bad_line_of_jsonl_and_a_bad_row_of_parquet_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "p", "answer": 1}\n{"prompt": "p", \n')
    with pytest.raises(DataError, match=r"a.jsonl, line 2 is not JSON \(Expecting [a-z ]+\)"):
        read(path)
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"problem": ["p"] * 3, "answer": [1, 2, None], "more": [0, 0, 0]})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError, match="a.parquet, row 2: answer=None"):
        read(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="not a readable parquet file"):
        read(path)
    with pytest.raises(DataError, match="not a readable parquet file"):
        count_rows(path)


def test_rows_come_one_by_one(tmp_path):
    """A whole file in memory would have met its last line already."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "p", "answer": 1}\n' * 3 + "broken\n")
    assert count_rows(path) == 4
    _, rows = read_rows(path, choose_shape)
    assert [next(rows)[0] for _ in range(3)] == [f"{path}, line {i}" for i in (1, 2, 3)]
    with pytest.raises(DataError, match="line 4"):
        next(rows)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data/missing.parquet", "does not exist; give an existing file, or OWNER/NAME"),
        ("/nowhere/at/all", "does not exist"),
        ("name", "does not exist"),
        ("openai/gsm8k:main/train.parquet", "cannot be fetched from the Hugging Face hub"),
    ],
)
def test_sources_that_are_not_there(source, message):
    with pytest.raises(DataError, match=message) as error:
        find_file(source)
    assert "\n" not in str(error.value)


def test_files_with_other_endings(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="files end in .jsonl, .csv, .parquet, found '.txt'"):
        find_file(str(tmp_path / "a.txt"))
    with pytest.raises(DataError, match="is a directory; give its files by their names"):
        find_file(str(tmp_path))


def test_the_one_data_file_of_a_data_set():
    assert only_data_file("o/n", ["README.md", "data/a.parquet"]) == "data/a.parquet"
    with pytest.raises(DataError, match="found a.csv, b.jsonl; name it: --data o/n:a.csv"):
        only_data_file("o/n", ["a.csv", "b.jsonl"])
    with pytest.raises(DataError, match="found none"):
        only_data_file("o/n", ["a.zip"])


CONTENT = b'{"question": "q", "answer": "#### 5"}\n'
COMMIT = "c" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """A data set owner/name with one file, and owner/two with two, as the hub serves them."""

    def do_HEAD(self):
        self.respond(body=False)

    def do_GET(self):
        self.respond(body=True)

    def respond(self, body):
        path = self.path.split("?")[0]
        if path.startswith("/datasets/owner/") and path.endswith("/train.jsonl"):
            content, kind = CONTENT, "text/plain"
        elif path.startswith("/api/datasets/owner/") and "/none" not in path:
            names = ["README.md", "train.jsonl", "test.jsonl"]
            names = names if "/two" in path else names[:2]
            tree = [{"type": "file", "path": n, "oid": "0", "size": 1} for n in names]
            about = {"id": "o", "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
            content = json.dumps(tree if "/tree/" in path else about).encode()
            kind = "application/json"
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_files_of_the_hub(hub, tmp_path):
    code = """
        import sys
        from vapo_megatron.cli.prepare.rows import find_file
        from vapo_megatron.errors import DataError
        for source in sys.argv[1:]:
            try:
                print(find_file(source).read_text(), end="")
            except DataError as error:
                print(error)
    """
    sources = ["owner/name", "owner/two:train.jsonl", "owner/two", "owner/none"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k}
    variables = {**kept, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}
    found = printed_by(code, *sources, env=variables).splitlines()
    assert found[:2] == [CONTENT.decode().strip()] * 2
    assert "found train.jsonl, test.jsonl; name it: --data owner/two:train.jsonl" in found[2]
    assert "--data=owner/none cannot be fetched" in found[3] and "404" in found[3]
