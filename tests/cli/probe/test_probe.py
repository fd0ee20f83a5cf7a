"""`vapo probe` from its options to its file: what is kept, refused, and told in one line.

Files and the math verifier are real. Not exercised: who samples (tests/e2e/test_evaluate.py), and
what goes on from the prefixes.
"""

import json
import random
import re
import shlex
from pathlib import Path

import pyarrow.parquet
import pytest

from tests import jsonl
from vapo_megatron.cli.main import main
from vapo_megatron.cli.probe.corrupt import corruptions
from vapo_megatron.cli.probe.probes import METADATA_KEY
from vapo_megatron.data.problems import load_problems

ROOT = Path(__file__).resolve().parents[3]
ROWS = [
    {"prompt": "1+1?", "answer": 2, "topic": "a"},
    {"prompt": "2+2?", "answer": 4, "topic": "b"},
    {"prompt": "3+3?", "answer": 6, "topic": "c"},
]
WRONG = "I add.\nThat is 3.\nAnswer: 3"


def response(sample, status, text, answer=None):
    return {
        "sample": sample, "status": status, "score": None, "answer": answer, "vote": 0,
        "num_tokens": 9, "truncated": False, "text": text,
    }  # fmt: skip


LINES = [
    [response(0, "correct", "Answer: 2", "2"), response(1, "wrong", WRONG, "3"),
     response(2, "wrong", "So\n#### 5", "5")],
    [response(0, "wrong", "Let me see. It is 5. So the answer is \\boxed{5}.", "5"),
     response(1, "unparsable", "Hm"), response(2, "failed", "Hm")],
    [response(i, "correct", "Answer: 6", "6") for i in range(3)],
]  # fmt: skip


@pytest.fixture
def place(tmp_path):
    """write(*lines) -> the samples file of tmp_path/all.jsonl; its own lines by default."""

    def samples(*lines, rows=ROWS, **header):
        data = tmp_path / "all.jsonl"
        jsonl.write(data, rows)
        first = {"evaluation": 1, "data": str(data), "samples": 3, "reward": {"verifier": "math"}}
        written = [{**first, **header}] + [
            {"prompt_index": i, "prompt": "", "answer": str(rows[i]["answer"]), "verifier": "math",
             "responses": responses}
            for i, responses in enumerate(lines or LINES)
        ]  # fmt: skip
        file = tmp_path / "all.samples.jsonl"
        jsonl.write(file, written)
        return file

    samples.directory = tmp_path
    return samples


@pytest.fixture
def probe(place, capsys):
    """probe(*arguments) -> (exit code, what is printed)."""

    def run(*arguments, out="out.parquet"):
        code = main(["probe", *map(str, arguments), "--out", str(place.directory / out)])
        told = capsys.readouterr()
        return code, told.err.strip() if code else told.out

    run.out = place.directory / "out.parquet"
    return run


def written(out):
    return pyarrow.parquet.read_table(out).to_pylist()


def test_wrong_samples_become_prefixes(place, probe):
    code, told = probe("self", "--samples", place())
    assert code == 0, told
    assert told.splitlines() == [
        "         1 problems without a wrong sample", "         2 probes written", str(probe.out),
    ]  # fmt: skip
    first, second = written(probe.out)
    assert first == {
        "prompt": "1+1?", "answer": "2", "topic": "a", "prefix": "I add.\nThat is 3.",
        "wrong_answer": "3", "task": "self",
    }  # fmt: skip
    assert second["prefix"] == "Let me see. It is 5." and second["topic"] == "b"
    # It can be evaluated as it is.
    problems = load_problems(probe.out)
    assert [p.metadata["task"] for p in problems] == ["self", "self"]
    about = json.loads(pyarrow.parquet.read_schema(probe.out).metadata[METADATA_KEY])
    assert about["written"] == 2 and about["header"]["samples"] == 3
    before = probe.out.read_bytes()
    assert probe("self", "--samples", place())[0] == 0 and probe.out.read_bytes() == before


def test_messages_stay_as_they_are(place, probe):
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    assert probe("self", "--samples", place(rows=rows))[0] == 0
    assert [row["prompt"] for row in written(probe.out)] == [row["prompt"] for row in rows[:2]]
    # Their numbers are given ones: 24 is no new number, 72 is.
    row = {**CHAINS[0], "question": [{"role": "user", "content": "Of 24?"}]}
    assert probe(*chains(place, row), *COLUMNS)[0] == 0
    assert "48/2 = 24 clips" in written(probe.out)[0]["prefix"]


def test_a_cut_several_of_a_problem_and_other_names(place, probe):
    options = ["--cut", "0.5", "--per-problem", "2", "--task", "mine", "--prefix-column", "topic"]
    assert probe("self", "--samples", place(), *options)[0] == 0
    found = [(row["topic"], row["wrong_answer"], row["task"]) for row in written(probe.out)]
    assert found == [
        ("I add.", "3", "mine"), ("So", "5", "mine"), ("Let me see. It is 5.", "5", "mine"),
    ]  # fmt: skip


def test_a_prefix_that_already_answers_right_is_refused(place, probe):
    right = response(0, "wrong", "It is 2.\nAnswer: 2\nNo.\nAnswer: 3", "3")
    lines = [[right, *LINES[0][1:]], *LINES[1:]]
    code, told = probe("self", "--samples", place(*lines))
    assert code == 2 and told == (
        f"probe: {place.directory}/all.samples.jsonl, problem 0, sample 0 has a prefix that "
        "already answers right ('2'); correct the rows, or leave them out with --skip-unusable"
    )
    assert not probe.out.exists()
    code, told = probe("self", "--samples", place(*lines), "--skip-unusable")
    assert code == 0 and told.splitlines()[1].startswith("         1 refused, such as ")
    assert [row["topic"] for row in written(probe.out)] == ["b"]
    # Cut before that it probes something.
    code, _ = probe("self", "--samples", place(*lines), "--cut", "0.4")
    assert code == 0 and [row["prefix"] for row in written(probe.out)][0] == "It is 2."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Answer: 3", "problem 0, sample 0 has no chain of thought before its answer (1 more)"),
        ("It is three", "sample 0 has no final answer to leave out; give a smaller --cut (1 more)"),
    ],
)
def test_samples_that_have_no_prefix(place, probe, text, message):
    lines = [[response(0, "wrong", text), *LINES[0][1:]], [response(0, "wrong", text)], LINES[2]]
    code, told = probe("self", "--samples", place(*lines))
    assert code == 2 and message in told and "\n" not in told
    code, told = probe("self", "--samples", place(*lines), "--skip-unusable")
    assert code == 2 and "no probe is left of " in told and "2 refused, such as" in told


CHAINS = [
    {"question": "48 clips, then half.", "target": "72", "solution":
     "She sold 48/2 = 24 clips in May.\nTogether 48+24 = 72 clips.\n#### 72"},
    {"question": "Of 5 and 2?", "target": "21", "solution": "5+2 = 7\n7*3 = 21"},
]  # fmt: skip
COLUMNS = ("data.prompt_column=question", "data.answer_column=target")


def chains(place, *rows):
    file = place.directory / "chains.jsonl"
    jsonl.write(file, rows)
    return ["arithmetic", "--data", file, "--chain-column", "solution"]


def test_arithmetic_errors(place, probe):
    arguments = chains(place, *CHAINS)
    assert probe(*arguments, *COLUMNS)[0] == 0
    rows = written(probe.out)
    for row, given in zip(rows, CHAINS, strict=True):
        assert {name: row[name] for name in given} == given and row["task"] == "arithmetic"
        assert row["prefix"] not in given["solution"] and "####" not in row["prefix"]
        assert row["wrong_answer"] != given["target"] and row["wrong_answer"] in row["prefix"]
    before = probe.out.read_bytes()
    assert probe(*arguments, *COLUMNS)[0] == 0 and probe.out.read_bytes() == before
    # A row's error depends on the seed and on no other row.
    assert probe(*arguments, "--seed", "1", *COLUMNS)[0] == 0 and written(probe.out) != rows
    assert probe(*chains(place, CHAINS[0]), *COLUMNS)[0] == 0 and written(probe.out) == rows[:1]


def test_the_error_lies_before_the_cut(place, probe):
    assert probe(*chains(place, *CHAINS), "--cut", "0.5", *COLUMNS)[0] == 0
    for row, chain in zip(written(probe.out), CHAINS, strict=True):
        assert "\n" not in row["prefix"]
        assert row["prefix"] != chain["solution"].partition("\n")[0]


def test_the_answer_column_may_have_the_chains(place, probe):
    arguments = chains(place, {"prompt": "48?", "answer": CHAINS[0]["solution"]})
    assert probe(*arguments[:-1], "answer")[0] == 0
    (row,) = written(probe.out)
    assert row["answer"] == CHAINS[0]["solution"] and row["wrong_answer"] != "72"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        # Whichever value the first step has, the last one is the answer, and 6 stands before it.
        ({"solution": "1+1 = 2. 3*2 = 6, and 6*1 = 6", "question": "2 and 6", "target": "6"},
         "has no step whose value is new, so none can be made wrong alone"),
        ({"solution": "1+1 = 2. 5+1 = 6", "question": "6", "target": "6"},
         "still has its right answer, or no error, with any step made wrong"),
        ({"solution": "It is 6", "question": "?", "target": "6"}, "has no step `a op b = c` in "),
        ({"solution": "5+1 = 6", "question": "?", "target": "7"},
         "has the answer '7', which its last step is not"),
        ({"solution": "5+1 = 6", "question": "?", "target": "six"},
         "has the answer 'six', which is no number"),
        ({"solution": "Answer: 6\nChecked: 5+1 = 6, 6*1 = 6", "question": "?", "target": "6"},
         "has no step `a op b = c` in "),
        ({"solution": 7, "question": "?", "target": "6"}, ": solution=7 must be a text; correct"),
        ({"question": "?", "target": "6", "chain": "5+1 = 6"},
         "has no column 'solution'; set --chain-column to one of those it has beside prompt and "
         "answer: chain"),
    ],
)  # fmt: skip
def test_rows_of_which_no_error_can_be_made(place, probe, row, message):
    code, told = probe(*chains(place, CHAINS[0], row), *COLUMNS)
    assert code == 2 and "\n" not in told and told.startswith("probe: row 1 (from 0) of "), told
    assert message in told and not probe.out.exists()
    if "column" not in message and "must be" not in message:
        code, told = probe(*chains(place, CHAINS[0], row), *COLUMNS, "--skip-unusable")
        assert code == 0 and message in told and len(written(probe.out)) == 1


def test_a_chain_that_answers_right_on_the_way_is_refused(place, probe):
    row = {"prompt": "?", "answer": "6", "solution": "\\boxed{6} as 5 + 1 = 6.\nAnswer: 6"}
    # The box holds a number of the chain, but before the step, so it stays right.
    row["solution"] = "Answer: six-6\n\\boxed{06}\n2*2 = 4\n4+2 = 6\nAnswer: 6"
    code, told = probe(*chains(place, row))
    assert code == 2 and "has a prefix that already answers right ('06')" in told


def test_what_does_not_fit_is_one_line(place, probe):
    samples = place()
    (place.directory / "other.parquet").write_bytes(b"PAR1")
    table = pyarrow.table({"a": [1]})
    pyarrow.parquet.write_table(table, place.directory / "mine.parquet")
    own = ["self", "--samples", samples]
    other = [{**row, "answer": 9} for row in ROWS]
    jsonl.write(place.directory / "nine.jsonl", other)
    for arguments, options, message in (
        (["self", "--samples", "nowhere.jsonl"], {}, "nowhere.jsonl does not exist; give one that"),
        (["self", "--samples", place.directory / "all.jsonl"], {}, "is not an evaluation's file"),
        ([*own, "--data", place.directory / "nine.jsonl"], {},
         "problem 0 is not row 0 (from 0) of "),
        ([*own, "--data", "nowhere.jsonl"], {}, "data file nowhere.jsonl does not exist"),
        ([*own, "--cut", "0"], {}, "--cut=0 must be in (0, 1], a share of steps; change it"),
        ([*own, "--cut", "1.5"], {}, "--cut=1.5 must be in"),
        ([*own, "--separator", "["], {}, "--separator=[ is no regular expression"),
        ([*own, "--separator", "x*"], {}, "--separator=x* matches nothing at all"),
        ([*own, "--per-problem", "0"], {}, "--per-problem=0 must be at least 1"),
        ([*own, "data.prompt_column=text"], {}, "has no column 'text'; set data.prompt_column to"),
        ([*own, "reward.verifier=nonsense"], {}, "reward.verifier=nonsense must be one of "),
        (own, {"out": "out.jsonl"}, "out.jsonl must end in .parquet"),
        (own, {"out": "mine.parquet"}, "mine.parquet exists and is no probe set; give another"),
        (["self"], {}, "the following arguments are required: --samples"),
        (["nonsense"], {}, "invalid choice: 'nonsense'"),
    ):  # fmt: skip
        code, told = probe(*arguments, **options)
        assert code == 2 and told.startswith("probe: ") and message in told, (arguments, told)
        assert "\n" not in told, told


def test_samples_of_an_unfinished_evaluation_of_episodes_and_of_probes(place, probe):
    code, told = probe("self", "--samples", place(probe={"prefix_column": "prefix"}))
    assert code == 2 and "all.samples.jsonl is of responses that go on from a prefix, which" in told
    episode = {**response(0, "wrong", WRONG, "3"), "turns": [], "begin": ""}
    code, told = probe("self", "--samples", place([episode], *LINES[1:]))
    assert code == 2 and "problem 0 has episodes, whose turns are no chain of thought" in told
    samples = place()
    part = samples.with_name(f"{samples.name}.part0000")
    part.write_text("")
    code, told = probe("self", "--samples", samples)
    assert code == 2 and "is not finished; let the evaluation end, or run it again" in told
    part.unlink()
    samples.write_text(samples.read_text() + '{"prompt_index": 3}\n')
    code, told = probe("self", "--samples", samples)
    assert code == 2 and "line 5 was not written by an evaluation; remove it" in told


def test_the_verifier_is_the_samples_own(place, probe):
    # By exact the prefix's last line is its answer, and right.
    lines = [[response(0, "wrong", "2\nAnswer: 3", "3")]]
    # A line's verifier comes before the run's.
    for name in ("exact", "math"):
        samples = place(*lines, reward={"verifier": name, "verifiers": {"exact": {}}})
        text = samples.read_text()
        samples.write_text(text.replace('"verifier": "math", "resp', '"verifier": "exact", "resp'))
        code, told = probe("self", "--samples", samples)
        assert code == 2 and "already answers right ('2')" in told
    assert probe("self", "--samples", place(*lines))[0] == 0, "math wants a marker"


def test_the_commands_of_the_page(place, monkeypatch, capsys):
    """On its files: samples in runs/evaluation, and chains in data/gsm8k.jsonl."""
    directory = place.directory
    monkeypatch.chdir(directory)
    of_run = directory / "runs/evaluation/runs/tiny/seed_0/vapo/test.jsonl"
    (directory / "data").mkdir()
    of_run.parent.mkdir(parents=True)
    place().rename(of_run)
    rows = [{"prompt": c["question"], "answer": c["target"], **c} for c in CHAINS]
    jsonl.write(directory / "data/gsm8k.jsonl", rows)
    page = (ROOT / "docs/evaluation.md").read_text()
    for text in re.findall(r"^vapo probe .*$", page, re.M):
        assert main(shlex.split(text)[1:]) == 0, capsys.readouterr().err
    assert [row["prefix"] for row in written("data/self.parquet")][0] == "I add."
    assert {row["task"] for row in written("data/arithmetic.parquet")} == {"gsm8k_adv"}
    # The page's example is a chain that the command may make.
    given, corrupted = re.findall(r"^\| (?:given|prefix) \| `(.*)` \|$", page, re.M)
    found = [c.chain for c in corruptions(given, "", random.Random(0))]
    assert corrupted in found
