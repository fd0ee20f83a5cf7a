"""Rows of reasoning_gym's tasks through vapo prepare, read back as training and its verifier do.

Not exercised: the prompts of published models; all tasks (each costs up to seconds a problem).
"""

import contextlib
import json
from functools import partial

import pytest

from tests.rollout.tiny_tokenizer import write_tiny_tokenizer
from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.cli.prepare import command, gym, gym_problems, gym_prompts
from vapo_megatron.config import RewardConfig
from vapo_megatron.data.problems import load_problems
from vapo_megatron.errors import ConfigError
from vapo_megatron.reward.verifiers import Verifiers
from vapo_megatron.rollout.tokenizer import load_tokenizer
from vapo_megatron.sandbox.pool import WorkerPool

SMOL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2-Instruct's chat template."""
EASY = {"max_digits": 1, "max_terms": 2}


@pytest.fixture(scope="module")
def pool():
    """The command's own processes and the stand-in task, started once."""
    running = WorkerPool("tests.reward.own_gym:make_handler", {}, 2, 600, 8 * 10**9)
    yield running
    running.close()


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    tokenizer = load_tokenizer(directory)
    tokenizer.chat_template = SMOL
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def vapo(pool, tokenizer_directory, tmp_path, monkeypatch, capsys):
    """vapo(arguments, ...) -> (problems of --out, what it printed); an error: its line."""
    monkeypatch.setattr(gym, "open_pool", lambda: contextlib.nullcontext(pool))
    # A slow machine has nothing else to say either.
    monkeypatch.setattr(gym_problems, "ProgressBar", partial(ProgressBar, after_seconds=3600))

    def run(tasks, *arguments, out="out.parquet"):
        given = ["--reasoning-gym", tasks, *map(str, arguments), "--overwrite"]
        given += ["--out", str(tmp_path / out), "--tokenizer", str(tokenizer_directory)]
        code = command.main(given)
        printed = capsys.readouterr()
        if code:
            assert code == 2 and printed.err.count("\n") == 1
            return printed.err
        return load_problems(tmp_path / out), printed.out

    return run


def questions(problems):
    return [json.loads(p.metadata["reasoning_gym"])["entry"]["question"] for p in problems]


def tasks_of(problems):
    return [json.loads(p.metadata["reasoning_gym"])["task"] for p in problems]


TASKS = "gcd,rotate_matrix,gsm_symbolic,rush_hour"


def test_rows_are_judged_as_they_stand(vapo, tmp_path):
    problems, printed = vapo(TASKS, "--rows", 10, "--max-prompt-tokens", 9999)
    # The tasks by turns; the first have one more.
    expected = ["gcd", "gsm_symbolic", "rotate_matrix", "rush_hour"] * 2 + ["gcd", "gsm_symbolic"]
    assert tasks_of(problems) == expected
    assert (
        "10 problems written, template answer" in printed and "gcd: shape reasoning_gym" in printed
    )
    assert "2 of them have no answer" in printed and "cannot use their answer\n" in printed
    assert {p.verifier for p in problems} == {"reasoning_gym"}
    with Verifiers(RewardConfig(num_workers=1, timeout_seconds=600)) as verifiers:
        assert verifiers.unusable(problems) == {}
        given = [p for p in problems if p.answer]
        forms = ["<answer>{}</answer>" if "<answer>" in p.prompt else "Answer: {}" for p in given]
        found = verifiers.score([f.format(p.answer) for f, p in zip(forms, given)], given)
        assert [v.status for v in found] == ["correct"] * 8
    # Only answers of several lines need tags.
    tagged = {t for t, p in zip(expected, problems) if "<answer> and </answer>" in p.prompt}
    assert tagged == {"rotate_matrix"}
    assert problems[0].prompt == f"{gym_prompts.INSTRUCTIONS[0]}\n\n{questions(problems)[0]}\n"


def test_the_same_arguments_write_the_same_file(vapo, tmp_path):
    one = ("--rows", 30, "--seed", 3, "--shots", 1)
    first, _ = vapo("isomorphic_strings,gcd", *one, out="a.parquet")
    vapo("gcd, isomorphic_strings", *one, out="b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    fewer, _ = vapo("isomorphic_strings", "--rows", 5, "--seed", 3, "--shots", 1)
    alone = [p for p, task in zip(first, tasks_of(first)) if task != "gcd"]
    assert [p.prompt for p in fewer] == [p.prompt for p in alone[:5]]
    other, _ = vapo("isomorphic_strings", "--rows", 5, "--seed", 4)
    assert not {*questions(other)} & {*questions(first)}


def test_no_problem_stands_twice_or_in_both_files(vapo, tmp_path):
    """stand_in has 60 problems: 40 rows, 15 of the test and 5 examples take them all."""
    small = ("--config", '{"distinct": 60}', "--shots", 5, "--template", "chat")
    held_out = ("--test-rows", 15, "--test-out", tmp_path / "test.parquet")
    rows, printed = vapo("stand_in", "--rows", 40, *small, *held_out)
    test = load_problems(tmp_path / "test.parquet")
    shown = rows[0].prompt.count("Answer: ") - 6  # The instruction has it too.
    assert (len(rows), len(test), shown) == (40, 15, 5)
    *before, last, _ = rows[0].prompt.split("<|im_start|>")[1:]
    assert all(p.prompt.startswith(rows[0].prompt.partition(last)[0]) for p in rows + test)
    examples = [
        part.rpartition("Answer: ")[2].removesuffix("<|im_end|>\n") for part in before[2::2]
    ]
    everything = [*questions(rows), *questions(test), *(f"w{n}" for n in examples)]
    assert len(set(everything)) == 60 == len(everything)
    # The test rows are the same beside fewer others.
    vapo("stand_in", "--rows", 4, *small, *held_out)
    assert load_problems(tmp_path / "test.parquet") == test
    error = vapo("stand_in", "--rows", 41, *small, *held_out)
    assert "stand_in: 60 distinct problems were found in " in error and "61 are needed" in error


def test_a_system_prompt_and_examples_in_a_chat_template(vapo):
    given = ("--rows", 1, "--config", json.dumps(EASY), "--system", "Be brief.", "--shots", 2)
    for template, instruction in (("chat", f"{gym_prompts.INSTRUCTIONS[0]}\n\n"), ("none", "")):
        [row], _ = vapo("chain_sum", *given, "--template", template)
        parts = row.prompt.split("<|im_start|>")[1:]
        assert [part.partition("\n")[0] for part in parts] == [
            "system", "user", "assistant", "user", "assistant", "user", "assistant"
        ]  # fmt: skip
        assert parts[0] == "system\nBe brief.<|im_end|>\n" and parts[-1] == "assistant\n"
        state = "State the final answer to the following arithmetic problem: "
        for part in parts[1::2]:
            assert part.startswith(f"user\n{instruction}{state}")
        for asked, answer in zip(parts[1:4:2], parts[2:5:2]):
            first, sign, second = asked.partition(state)[2].split(" =")[0].split()
            value = int(first) + int(sign + second)
            assert answer == f"assistant\nAnswer: {value}<|im_end|>\n"
    [row], _ = vapo("chain_sum", *given, "--answer-tags")
    head, *shown, last = row.prompt.split(state)
    assert head == f"Be brief.\n\n{gym_prompts.INSTRUCTIONS[1]}\n\n" and len(shown) == 2
    assert all(part.endswith("</answer>\n\n") for part in shown) and last.endswith(" =\n")
    [bare], _ = vapo("chain_sum", "--rows", 1, "--template", "none")
    assert bare.prompt == questions([bare])[0]


def test_what_its_own_scorer_refuses_is_left_out_with_a_count(vapo):
    config = ("--config", '{"distinct": 100, "every_wrong": 4}')
    problems, printed = vapo("stand_in", "--rows", 75, *config)
    assert sorted(map(int, (p.answer for p in problems))) == [n for n in range(100) if n % 4]
    line = next(line for line in printed.splitlines() if "cannot use" in line)
    assert "which its task stand_in does not score as correct" in line
    counts = [int(text.split()[0].replace(",", "")) for text in printed.splitlines()[1:4]]
    assert counts[0] - counts[1] - int(line.split()[0]) == 75
    assert "75 distinct problems" in vapo("stand_in", "--rows", 76, *config)
    for kind, words in (
        ("fails", "stand_in cannot be made: ValueError: Failed"),
        ("loose", "has the task stand_in, which scores '?' as correct"),
        ("odd", "is scored 0.0 for 'A B' from JSON, and 1.0 before"),
    ):
        error = vapo("stand_in", "--rows", 2, "--config", json.dumps({"kind": kind}))
        assert "1,000 others are unusable, such as stand_in" in error and words in error


def test_a_task_that_hangs_or_fails_is_one_line(vapo, pool, monkeypatch):
    monkeypatch.setattr(gym, "check_tasks", lambda pool, configs: None)
    error = vapo("stand_in", "--rows", 1, "--config", '{"distinct": 0}')
    assert "cannot be made: ZeroDivisionError" in error
    monkeypatch.setattr(pool, "run", lambda requests: [{"over_time": True}] * len(requests))
    assert "took more than 600 seconds for 20 problems; make it easier" in vapo("gcd", "--rows", 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("hop --rows 1", "--reasoning-gym=hop is no task of reasoning_gym"),
        (", --rows 1", "--reasoning-gym must name a task"),
        ("gcd", "--rows=0 must be 1 at least"),
        ("gcd --rows 1 --shots -1", "--shots=-1 must be 0 at least"),
        ("gcd --rows 1 --test-rows 1", "--test-rows and --test-out belong together"),
        ("gcd --rows 1 --test-out t.parquet", "--test-rows and --test-out belong together"),
        ("gcd --rows 1 --test-rows 1 --test-out t.jsonl", "--test-out=t.jsonl must end in"),
        ("gcd --rows 1 --config [1]", "must be an object of settings"),
        ("gcd --rows 1 --config {", "is not JSON"),
        ('gcd --rows 1 --config {"max_valu":2}', "gcd has no setting max_valu; it has min_numbers"),
        ('gcd --rows 1 --config {"seed":2}', "gcd has no setting seed"),
        ('gcd --rows 1 --config {"min_numbers":1}', "AssertionError: min_numbers must be at least"),
        ('gcd --rows 1 --config {"lcm":{}}', "--config has lcm beside"),
        ("rush_hour --rows 1 --shots 1", "--shots: the task rush_hour gives no answers"),
        ("gcd --rows 1 --shape plain", "--shape goes with --data; remove it"),
        ("gcd --rows 1 --data x.jsonl", "not allowed with argument"),
    ],
)
def test_a_mistake_is_one_line(vapo, arguments, words):
    assert words in vapo(*arguments.split(" "))


def test_options_of_tasks_are_refused_beside_files(tokenizer_directory, tmp_path, capsys):
    given = ["--data", "x.jsonl", "--rows", "3", "--out", str(tmp_path / "o.parquet")]
    assert command.main([*given, "--tokenizer", str(tokenizer_directory)]) == 2
    assert "--rows goes with --reasoning-gym; remove it" in capsys.readouterr().err


def test_a_file_that_is_there_is_kept(tokenizer_directory, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gym, "open_pool", None)  # Nothing is made before it is seen.
    (tmp_path / "t.parquet").write_text("mine")
    given = ["--reasoning-gym", "gcd", "--rows", "3", "--out", str(tmp_path / "o.parquet")]
    given += ["--test-rows", "1", "--test-out", str(tmp_path / "t.parquet")]
    assert command.main([*given, "--tokenizer", str(tokenizer_directory)]) == 2
    assert "t.parquet exists; give another file, or --overwrite" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_settings_by_task_or_for_all():
    for text, expected in (
        (None, [{}, {}]),
        ('{"min_value": 2}', [{"min_value": 2}] * 2),
        ('{"lcm": {"min_value": 2}}', [{}, {"min_value": 2}]),
    ):
        found = gym.read_configs(text, ["lcm", "gcd"])
        assert found == dict(zip(("gcd", "lcm"), expected)) and list(found) == ["gcd", "lcm"]


def test_tasks_are_listed(vapo, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--reasoning-gym", "help"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out.replace("\n", " ").split(", ")
    assert {"chain_sum", "maze", "stand_in"} <= set(listed) and "composite" not in listed


def test_a_package_that_does_not_load_is_named(monkeypatch):
    monkeypatch.setattr(gym_problems, "HANDLER", "tests.nowhere:make_handler")
    with pytest.raises(ConfigError, match=r"No module named 'tests.nowhere'.*vapo-megatron\[reaso"):
        with gym_problems.open_pool():
            pass
