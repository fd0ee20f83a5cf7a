"""Published data sets into training data: small files in their exact schemas, through the tool.

Not exercised: tokenizers and chat templates of published models, a data set of full size (the slow
test makes one of a tenth).
"""

import csv
import dataclasses
import decimal
import functools
import json
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.rollout.tiny_tokenizer import write_tiny_tokenizer
from vapo_megatron.cli.prepare import command
from vapo_megatron.cli.prepare.columns import (
    ANSWER_PREFIX,
    ANSWER_SUFFIX,
    choose_shape,
    strip_instructions,
)
from vapo_megatron.cli.prepare.prepare import METADATA_KEY, make_template, prepare
from vapo_megatron.cli.prepare.rows import ALL
from vapo_megatron.config import DataConfig
from vapo_megatron.data.problems import Problem, load_problems
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.errors import DataError
from vapo_megatron.reward.math_verifier import MathVerifier
from vapo_megatron.rollout.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tool():
    return command


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(tokenizer_directory):
    return load_tokenizer(tokenizer_directory)


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier(num_workers=1, timeout_seconds=60) as shared:
        yield shared


@pytest.fixture
def make(tmp_path, tokenizer, verifier):
    """Prepare files and read the result as training does, with the default columns."""

    def run(*files, **options):
        out = tmp_path / "out.parquet"
        summary = prepare(
            [str(f) for f in files], out,
            tokenizer=tokenizer, verifier=verifier, overwrite=True, **options,
        )  # fmt: skip
        columns = DataConfig()
        return summary, load_problems(out, columns.prompt_column, columns.answer_column)

    return run


def asked(problem):
    return (
        "Solve the following math problem step by step. The last line of your response should be "
        "of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
        f'\n\n{problem}\n\nRemember to put your answer on its own line after "Answer:".\n'
    )


def dapo_row(problem, answer, index=0):
    """A row of DAPO-Math-17k and of its AIME-2024, column by column."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": asked(problem)[:-1], "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{index:08x}-0000-0000-0000-000000000000"},
    }


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def parquet_of_no_rows(path):
    nothing = pyarrow.array([], pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": nothing, "answer": nothing}), path)
    return path


def csv_file(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_dapo_math_17k(make, tmp_path):
    rows = [dapo_row(f"What is ${i}+1$?", str(i + 1), i) for i in (5, 3)] * 100
    summary, problems = make(parquet(tmp_path / "dapo.parquet", rows))
    assert [(p.prompt, p.answer) for p in problems] == [
        (asked("What is $5+1$?"), "6"), (asked("What is $3+1$?"), "4")
    ]  # fmt: skip
    others = {"data_source": "math_dapo", "ability": "MATH", "extra_info": rows[0]["extra_info"]}
    assert problems[0].metadata == others
    assert summary.files[0]["shape"] == "verl"
    # 200 rows, 2 problems.
    assert (summary.rows, summary.duplicates, summary.written) == (200, 198, 2)


def test_its_instructions_are_never_doubled(make, tmp_path):
    file = parquet(tmp_path / "dapo.parquet", [dapo_row("What is 1+1?", "2")])
    for template in ("answer", "none"):
        _, (problem,) = make(file, template=template)
        assert problem.prompt.count("Solve the following") == 1
        assert problem.prompt.count("Remember to put") == 1


@pytest.mark.parametrize(
    "prompt",
    [
        asked("Is $x$ 5?"),
        asked("Is $x$ 5?") + "\n ",
        'Is $x$ 5? Let\'s think step by step and output the final answer after "####".',
        "Is $x$ 5? Let's think step by step and output the final answer within \\boxed{}.",
        "Is $x$ 5?\nPlease reason step by step, and put your final answer within \\boxed{}.",
        " Is $x$ 5?\n",
    ],
)
def test_published_instructions_come_off(prompt):
    assert strip_instructions(prompt) == "Is $x$ 5?"


def test_half_an_instruction_is_part_of_the_problem():
    assert strip_instructions(ANSWER_PREFIX + "Is it?") == ANSWER_PREFIX + "Is it?"
    assert strip_instructions("Is it?" + ANSWER_SUFFIX) == "Is it?" + ANSWER_SUFFIX


def test_gsm8k_as_its_files_and_as_verl_converts_it(make, tmp_path):
    solution = "In May she sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = 72.\n#### 72"
    raw = jsonl(
        tmp_path / "train.jsonl",
        [
            {"question": "How many clips?", "answer": solution},
            {"question": "How much?", "answer": "#### 1 by 1,080 is\n#### 1,080"},
        ],
    )
    row = dapo_row("", "72")
    suffix = ' Let\'s think step by step and output the final answer after "####".'
    row["prompt"][0]["content"] = "How many clips?" + suffix
    summary, problems = make(raw, parquet(tmp_path / "train.parquet", [row]))
    expected = [Problem(asked("How many clips?"), "72"), Problem(asked("How much?"), "1,080")]
    assert problems == expected
    assert [f["shape"] for f in summary.files] == ["gsm8k", "verl"]
    assert (summary.rows, summary.duplicates) == (3, 1)


@pytest.mark.parametrize("columns", [("problem", "answer"), ("Problem", "Answer")])
@pytest.mark.parametrize(
    "write,ending", [(jsonl, "jsonl"), (csv_file, "csv"), (parquet, "parquet")]
)
def test_aime(make, tmp_path, columns, write, ending):
    rows = [
        {"id": 60, columns[0]: 'Every "morning", Aya\nwalks $9$ km.', columns[1]: 204},
        {"id": 61, columns[0]: "Let $ABC$ be a triangle, \\frac{1}{2}.", columns[1]: 33},
    ]
    for row in rows:
        row["url"] = "https://example.org"
    summary, problems = make(write(tmp_path / f"aime.{ending}", rows))
    assert summary.files[0]["shape"] == "aime"
    assert [p.answer for p in problems] == ["204", "33"]
    assert problems[0].prompt == asked('Every "morning", Aya\nwalks $9$ km.')


def test_plain_columns_and_named_ones(make, tool, tmp_path, tokenizer_directory, capsys):
    rows = [{"prompt": "w3 w4", "answer": 7}, {"prompt": "w5", "answer": "\\frac12"}]
    _, problems = make(jsonl(tmp_path / "a.jsonl", rows), template="none")
    assert problems == [Problem("w3 w4", "7"), Problem("w5", "\\frac12")]
    file = csv_file(
        tmp_path / "b.csv", [{"q": "w3", "solution": "5", "answer": "x", "prompt": "y"}]
    )
    out = tmp_path / "b.parquet"
    arguments = ["--data", str(file), "--out", str(out), "--tokenizer", str(tokenizer_directory)]
    columns = ["--prompt-column", "q", "--answer-column", "solution", "--template", "none"]
    assert tool.main([*arguments, *columns]) == 0
    assert load_problems(out) == [Problem("w3", "5")]
    shown = capsys.readouterr().out
    assert "shape plain, 1 rows" in shown and "1 problems written" in shown and str(out) in shown


def test_spacing_makes_no_other_problem(make, tmp_path):
    rows = [{"prompt": p, "answer": 1} for p in ("w3  w4", " w3\nw4 ", "w4 w3", "W3 w4")]
    summary, problems = make(jsonl(tmp_path / "a.jsonl", rows), template="none")
    assert [p.prompt for p in problems] == ["w3  w4", "w4 w3", "W3 w4"]
    assert summary.duplicates == 1


def test_a_problem_with_two_answers_is_left_out_unless_they_are_equal(make, tmp_path):
    answers = {"w3": ["5", "6"], "w4": ["1/2", "0.5", "\\frac{1}{2}"], "w5": ["7", "7"]}
    rows = [{"prompt": p, "answer": a} for p, several in answers.items() for a in several]
    summary, problems = make(jsonl(tmp_path / "a.jsonl", rows), template="none")
    assert problems == [Problem("w4", "1/2"), Problem("w5", "7")]
    # 7 rows, 3 problems.
    assert (summary.rows, summary.duplicates, summary.conflicting) == (7, 4, 1)


def test_long_prompts_are_left_out_and_counted(make, tmp_path, tokenizer):
    rows = [{"prompt": " ".join(["w3"] * n), "answer": 1} for n in (4, 5, 6, 3)]
    summary, problems = make(
        jsonl(tmp_path / "a.jsonl", rows), template="none", max_prompt_tokens=5
    )
    assert [len(p.prompt.split()) for p in problems] == [4, 5, 3]
    assert (summary.too_long, summary.longest_prompt_tokens) == (1, 5)
    # What is left, training takes with the same limit; the template counts.
    PromptDataset(problems, tokenizer.encode, path="", seed=0, shuffle=False, max_prompt_tokens=5)
    with pytest.raises(DataError, match="nothing is left to write: of 4 problems .* 4 more than"):
        make(tmp_path / "a.jsonl", template="answer", max_prompt_tokens=5)


def test_answers_that_cannot_be_read_are_refused_or_left_out(make, tmp_path, monkeypatch):
    monkeypatch.setattr("vapo_megatron.cli.prepare.prepare._CHUNK", 1)
    rows = [{"prompt": f"w{i}", "answer": a} for i, a in enumerate(["1", "???", "2"], 3)]
    file = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(
        DataError, match=r"cannot use 1 of 3 .*line 2 has .*'\?\?\?', .*--skip-unus"
    ):
        make(file)
    summary, problems = make(file, skip_unusable=True, template="none")
    assert [p.answer for p in problems] == ["1", "2"] and summary.unusable == 1
    rows += [{"prompt": "w9", "answer": True}, {"prompt": "w8", "answer": None}]
    summary, problems = make(jsonl(file, rows), skip_unusable=True, template="none")
    assert [p.answer for p in problems] == ["1", "2"] and summary.unusable == 3
    assert (summary.rows, summary.duplicates) == (5, 0)
    assert "3 left out: the verifier cannot use their answer, such as" in summary.describe()


def test_answers_are_what_the_verifier_reads(make, tmp_path):
    """Lists as text, columns of short floats, and decimals."""
    answers = ['["3","5"]', "{'answer': 42}", '["42"]', "[3, 5]"]
    rows = [{"prompt": f"w{i}", "answer": a} for i, a in enumerate(answers, 3)]
    _, problems = make(jsonl(tmp_path / "a.jsonl", rows), template="none")
    assert [p.answer for p in problems] == ['["3","5"]', "42", "42", "[3, 5]"]
    tenths = [(0.1, pyarrow.float32(), "0.1"), ("0.10", pyarrow.decimal128(9, 2), "0.10")]
    for value, kind, text in tenths:
        column = pyarrow.array([decimal.Decimal(value) if text == "0.10" else value], kind)
        table = pyarrow.table({"prompt": ["w3"], "answer": column})
        pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
        _, problems = make(tmp_path / "b.parquet", template="none")
        assert problems == [Problem("w3", text)]


def test_rows_without_answers(make, tmp_path):
    rows = [{"prompt": "w3", "answer": None}, {"prompt": "w4", "answer": 1}]
    file = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match="line 1: answer=None has no answer; .*--without-answers"):
        make(file, template="none")
    summary, problems = make(file, template="none", needs_answers=False)
    assert problems == [Problem("w3", ""), Problem("w4", "1")] and summary.without_answer == 1
    # A row that names another verifier is left to that one.
    rows = [{"prompt": "w3", "answer": None, "verifier": "judge"},
            {"prompt": "w4", "answer": "???", "verifier": "exact"}]  # fmt: skip
    _, problems = make(jsonl(file, rows), template="none")
    assert [(p.answer, p.verifier) for p in problems] == [("", "judge"), ("???", "exact")]


def test_other_columns_stay_unless_they_are_dropped(make, tmp_path):
    rows = [
        {
            "question": "w3",
            "answer": "#### 1",
            "prompt": "x",
            "id": 7,
            "tags": ["a"],
            "level": None,
        },
        {"question": "w4", "answer": "#### 2", "level": 0.5},
    ]
    file, named = jsonl(tmp_path / "a.jsonl", rows), functools.partial(choose_shape, name="gsm8k")
    summary, (first, second) = make(file, template="none", choose=named)
    assert (first.prompt, first.answer) == ("w3", "1")
    assert first.metadata == {"id": 7, "tags": ["a"], "level": None}
    assert second.metadata == {"id": None, "tags": None, "level": 0.5}
    assert summary.columns == ["id", "tags", "level"]
    for dropped, left in ((["tags", "level"], ["id"]), ([ALL], [])):
        for source in (file, parquet(tmp_path / "a.parquet", rows)):
            summary, _ = make(source, template="none", choose=named, dropped=dropped)
            assert summary.columns == left
            with pytest.raises(DataError, match="--drop-columns tag: no file .* are .*level"):
                make(source, template="none", choose=named, dropped=["id", "tag"])
    rows[1]["id"] = "seven"
    with pytest.raises(DataError, match="'id' is int64 in .*line 1 and string .*--drop-columns id"):
        make(jsonl(file, rows), template="none", choose=named)


def test_prose_is_counted_and_the_first_prompt_shown(make, tmp_path, tokenizer, monkeypatch):
    rows = [{"prompt": "w3 w4", "answer": "the initial velocity"}, {"prompt": "w5", "answer": 1}]
    summary, _ = make(jsonl(tmp_path / "a.jsonl", rows), template="none")
    shown = summary.describe()
    assert "warning: 1 answers are prose, such as" in shown and "'the initial velocity'" in shown
    assert shown.endswith("the first prompt, as its tokens read:\nw3w4")
    # What encoding adds is seen, and what is long is cut in the middle.
    monkeypatch.setattr(tokenizer, "encode", lambda text, f=tokenizer.encode: [7, *f(text)])
    rows = [{"prompt": "w3 " * 400 + "w4", "answer": 1}]
    summary, _ = make(jsonl(tmp_path / "a.jsonl", rows), template="none")
    begin = tokenizer.decode([7])
    assert summary.first_prompt.startswith(f"{begin}w3w3") and summary.first_prompt.endswith("w4")
    assert " [...] " in summary.first_prompt and len(summary.first_prompt) < 800


def test_prompts_in_a_chat_template_already_are_named(make, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "all_special_tokens", ["<|im_end|>"])
    rows = [{"prompt": f"<|im_start|>user\n{i}<|im_end|>", "answer": i} for i in (3, 4)]
    file = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match="2 of 2 prompts have .*'<|im_end|>' in .*--template none"):
        make(file)
    _, problems = make(file, template="none")
    assert problems[0].prompt == rows[0]["prompt"]
    mostly_plain = [*rows[:1], {"prompt": "w3", "answer": 1}, {"prompt": "w4", "answer": 1}]
    make(jsonl(file, mostly_plain))


CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_the_chat_template_holds_the_same_instructions(tokenizer_directory):
    tokenizer = load_tokenizer(tokenizer_directory)
    with pytest.raises(
        DataError, match="no chat template; give --template answer, or --template none"
    ):
        make_template("chat", tokenizer)
    tokenizer.chat_template = CHAT
    text = make_template("chat", tokenizer)("1+1?")
    assert text == f"<|user|>{asked('1+1?')[:-1]}<end><|assistant|>"


SYSTEM = {"role": "system", "content": "s"}
TURNS = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]


def test_tools_are_in_the_text_and_no_longer_in_a_column(make, tmp_path, tokenizer, monkeypatch):
    """Messages may be texts; rows that differ in their tools are two problems."""
    user = [{"role": "user", "content": "w5"}]
    rows = [
        {"prompt": json.dumps(user), "answer": 1, "tools": tools, "level": "w"}
        for tools in ([{"name": "w6"}], '[{"name": "w7"}]', [{"name": "w6"}], None)
    ]
    file = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match="line 1: the prompt has tools or .*give --template chat"):
        make(file)
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        "{{ tools[0].name if tools else 'w8' }} {{ messages[0].content }}",
    )
    summary, problems = make(file, template="chat")
    assert [p.prompt[:2] for p in problems] == ["w6", "w7", "w8"] and summary.duplicates == 1
    assert [dict(p.metadata) for p in problems] == [{"level": "w"}] * 3
    _, problems = make(file, template="none")
    assert [p.prompt for p in problems] == ["w6 w5", "w7 w5", "w5"]
    answered = [*user, {"role": "assistant", "content": "w4"}, {"role": "tool", "content": "w3"}]
    with pytest.raises(DataError, match="prompt ends with .* role tool, .*without vapo prepare"):
        make(jsonl(tmp_path / "b.jsonl", [{"prompt": answered, "answer": 1}]))


def test_messages_before_the_problem_stay_before_it(make, tmp_path, tokenizer, monkeypatch):
    """A message of the user alone is its text; others need a chat template."""
    alone = [{"role": "user", "content": "w5"}]
    prompts = [alone, [SYSTEM, *alone], [SYSTEM, *TURNS, *alone], [SYSTEM, *TURNS, *alone]]
    rows = [{"prompt": prompt, "answer": 1} for prompt in prompts]
    file = parquet(tmp_path / "a.parquet", rows)
    with pytest.raises(DataError, match="row 1: the prompt has messages before .*--template chat"):
        make(file)
    with pytest.raises(
        DataError, match="row 1: the prompt has messages before .* no chat template; remove the row"
    ):
        make(file, template="none")
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    summary, problems = make(file, template="none")
    start = "<|system|>s<end>"
    assert [p.prompt for p in problems] == [
        "w5",
        f"{start}<|user|>w5<end><|assistant|>",
        f"{start}<|user|>w3<end><|assistant|>w4<end><|user|>w5<end><|assistant|>",
    ]
    assert summary.duplicates == 1
    _, problems = make(file, template="chat")
    last = f"<|user|>{asked('w5')[:-1]}<end><|assistant|>"
    turns = "<|user|>w3<end><|assistant|>w4<end>"
    assert [p.prompt for p in problems] == [last, start + last, start + turns + last]


def test_a_begin_token_is_written_once(tokenizer_directory):
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(tokenizer_directory)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = tokenizer.bos_token_id
    tokenizer.chat_template = "{{ bos_token }} w5 " + CHAT
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": asked("w6")[:-1]}], add_generation_prompt=True,
        return_dict=False,
    )  # fmt: skip
    assert whole[0] == begin
    for single in ("$A", "<s> $A"):
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single=single, special_tokens=[("<s>", begin)]
        )
        assert tokenizer.encode(make_template("chat", tokenizer)("w6")) == whole
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="$A <s>", special_tokens=[("<s>", begin)]
    )
    with pytest.raises(DataError, match="other special tokens around it; give --template answer"):
        make_template("chat", tokenizer)


def test_the_file_says_how_it_was_made_and_is_replaced_whole(make, tmp_path, tokenizer, verifier):
    good = jsonl(tmp_path / "good.jsonl", [{"prompt": "w3", "answer": 1}])
    bad = jsonl(tmp_path / "bad.jsonl", [{"prompt": "w3", "answer": 1}, {"prompt": "w4"}])
    summary, _ = make(good)
    out = tmp_path / "out.parquet"
    before = out.read_bytes()
    about = json.loads(pyarrow.parquet.read_schema(out).metadata[METADATA_KEY])
    assert about == dataclasses.asdict(summary) and about["template"] == "answer"
    with pytest.raises(DataError, match="line 2 has no column 'answer'"):
        make(bad)
    assert out.read_bytes() == before
    with pytest.raises(DataError, match="out.parquet exists; give another file, or --overwrite"):
        prepare([str(good)], out, tokenizer=tokenizer, verifier=verifier)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "good.jsonl", "out.parquet"]


def test_a_disk_that_fails_leaves_what_was_there(make, tmp_path, monkeypatch):
    good = jsonl(tmp_path / "good.jsonl", [{"prompt": "w3", "answer": 1}])
    make(good)
    before = (tmp_path / "out.parquet").read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match="out.parquet cannot be written: No space left .*; free"):
        make(good, template="none")
    assert (tmp_path / "out.parquet").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good.jsonl", "out.parquet"]


def test_a_mistake_is_one_line_and_exit_code_2(tool, tmp_path, tokenizer_directory, capsys):
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "w3", "answer": "1"}])
    for data, out, words in (
        (tmp_path / "b.jsonl", "o.parquet", "b.jsonl does not exist"),
        (file, "o.jsonl", "must end in .parquet"),
        (parquet_of_no_rows(tmp_path / "none.parquet"), "o.parquet", "holds no rows"),
        (file, "o.parquet --max-prompt-tokens 0", "--max-prompt-tokens=0 must be at least 1"),
        (file, "o.parquet --max-prompt-tokens x", "invalid int value: 'x'; --help lists"),
        (file, "a.jsonl/o.parquet", "a.jsonl/o.parquet cannot be written: File exists; fix that"),
        (file, "o.parquet --tokenizer nowhere", "--tokenizer=nowhere does not exist"),
    ):
        out, *more = out.split()
        arguments = ["--tokenizer", str(tokenizer_directory), "--data", str(data)]
        assert tool.main([*arguments, "--out", str(tmp_path / out), *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith("prepare: ") and words in error and error.count("\n") == 1


@pytest.mark.slow
def test_repeated_rows_cost_no_memory(tmp_path, tokenizer_directory):
    """179,170 rows in one row group: DAPO-Math-17k's 17,917 problems, 1 time and 10 times."""
    once = pyarrow.Table.from_pylist(
        [dapo_row(f"Problem {i}: " + "what is $x$? " * 20, str(i % 999), i) for i in range(17_917)]
    )
    peaks = []
    for times in (1, 10):
        file = tmp_path / f"{times}.parquet"
        table = pyarrow.concat_tables([once] * times)
        pyarrow.parquet.write_table(table, file, row_group_size=table.num_rows)
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        subprocess.run(
            [
                sys.executable, "-m", "vapo_megatron", "prepare", "--data", file,
                "--out", tmp_path / f"{times}.out.parquet", "--tokenizer", tokenizer_directory,
            ],
            check=True, capture_output=True, cwd=ROOT,
        )  # fmt: skip
        peaks.append(max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024)
    assert load_problems(tmp_path / "1.out.parquet") == load_problems(tmp_path / "10.out.parquet")
    # Nine times the rows again would be 9 * 8 MB compressed and far more as Python objects.
    assert peaks[1] - peaks[0] < 50 << 20, peaks
