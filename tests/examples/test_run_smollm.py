"""The run of a pretrained model on tasks of reasoning_gym: what its script starts, and its table.

The script is run in a folder of its own, with a stand-in for Python that notes its commands.
Not exercised but by the slow test: the commands themselves. Whether the model learns is for
examples/run_vapo_smollm.sh to say.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.examples.tiny import ROOT, write_lines
from vapo_megatron.config import load_config
from vapo_megatron.errors import DataError
from vapo_megatron.run.directory import read_run

SCRIPT = "examples/run_vapo_smollm.sh"
CONFIG = ROOT / "examples/configs/smollm.yaml"
NOTES = """
import json, pathlib, sys
arguments = sys.argv[1:]
with open("commands.jsonl", "a") as file:
    file.write(json.dumps(arguments) + "\\n")
if "prepare" in arguments:
    for option in {"--out", "--test-out"} & set(arguments):
        path = pathlib.Path(arguments[arguments.index(option) + 1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
"""


@pytest.fixture
def clone(tmp_path):
    """clone(arguments, ...) -> (exit code, its errors, the commands of Python)."""
    for name in (SCRIPT, "examples/make.sh", "tools/setup_env.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "notes.py").write_text(NOTES)
    python, real = tmp_path / "python", shlex.quote(sys.executable)
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exec {real} "$@"\nexec {real} notes.py "$@"\n')
    python.chmod(0o755)

    def run(*arguments):
        log = tmp_path / "commands.jsonl"
        log.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", SCRIPT, *arguments], cwd=tmp_path, text=True, capture_output=True, timeout=60,
            env={**os.environ, "VAPO_PYTHON": str(python)},
        )  # fmt: skip
        lines = log.read_text().splitlines() if log.exists() else []
        return done.returncode, done.stderr, [json.loads(line) for line in lines]

    return run


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--quik"], "error: '--quik' is none of --quick, --algorithm NAME, --seed N, --dry-run, "),
        (["--algorithm", "ppo"], "error: --algorithm ppo must be vapo, dapo or grpo"),
        (["--algorithm=ppo"], "error: --algorithm ppo must be vapo, dapo or grpo"),
        (["--seed"], "--seed needs a number"),
    ],
)
def test_what_it_refuses(clone, given, told):
    code, errors, commands = clone(*given)
    assert code != 0 and told in errors and not commands


def option(command, name):
    return command[command.index(name) + 1]


def test_model_problems_run_and_table(clone):
    code, errors, (model, *prepared, train, table) = clone("--seed", "3", "model.dtype=bfloat16")
    assert code == 0, errors
    assert model == ["examples/smollm/make_model.py", "--out", "runs/smollm/model"]
    config = load_config([CONFIG])
    assert config.model.hf_path == "runs/smollm/model"
    # The files that the configuration names, each with its own task's problems.
    trained_on = {option(c, "--reasoning-gym"): option(c, "--out") for c in prepared[:3]}
    held_out = {option(c, "--reasoning-gym"): option(c, "--test-out") for c in prepared[:3]}
    held_out |= {option(c, "--reasoning-gym"): option(c, "--out") for c in prepared[3:]}
    assert {name: of.path for name, of in config.data.sources.items()} == trained_on
    assert {name: of.path for name, of in config.evaluation.sources.items()} == held_out
    assert len(trained_on) == 3 and len(held_out) == 5
    for command in prepared:
        json.loads(option(command, "--config"))
        assert int(option(command, "--max-prompt-tokens")) <= config.rollout.max_prompt_tokens
    out = "runs/smollm/seed_3/vapo"
    assert train == [
        "-m", "vapo_megatron", "train", "--config", "examples/configs/smollm.yaml",
        "--config", "vapo", "seed=3", f"logging.run_dir={out}", "model.dtype=bfloat16",
    ]  # fmt: skip
    assert table == ["examples/smollm/before_after.py", out]
    # Again: what is there is not made again, and training resumes.
    assert clone("--seed", "3", "model.dtype=bfloat16")[2] == [model, train, table]


def test_other_ways_to_start_it(clone):
    *_, train, table = clone("--quick", "--algorithm", "grpo")[2]
    assert table[1] == "runs/smollm/quick/seed_0/grpo" and option(train[4:], "--config") == "grpo"
    quick = {
        "algorithm.policy_steps=3", "algorithm.responses_per_step=24",
        "algorithm.mini_batch_size=12", "evaluation.samples=1",
    }  # fmt: skip
    assert quick < set(train) and not [a for a in train if "value_pretraining" in a]
    *_, train, _ = clone("--quick")[2]
    assert quick | {"algorithm.value_pretraining_steps=1"} < set(train)
    *_, table = clone("logging.run_dir=runs/mine")[2]
    assert table[1] == "runs/mine"
    *_, train = clone("--dry-run")[2]
    assert "--dry-run" in train


@pytest.mark.parametrize("name", ["vapo", "dapo", "grpo"])
def test_its_configuration_with_each_algorithm(name):
    config = load_config([CONFIG, ROOT / f"examples/configs/algorithms/{name}.yaml"])
    assert config.parallel.pipeline_model_parallel_size == config.num_processes == 2
    assert (config.model.value_head_bias == "mean_return") == (name == "vapo")
    assert config.algorithm.policy_steps == 12 and config.algorithm.num_prompts % 3 == 0


def loaded(name):
    """A script of examples/smollm as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/smollm/{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def before_after():
    return loaded("before_after")


@pytest.fixture
def compare_algorithms(before_after, monkeypatch):
    """It imports the other script from its own directory."""
    monkeypatch.setitem(sys.modules, "before_after", before_after)
    return loaded("compare_algorithms")


@pytest.fixture
def run_dir(tmp_path):
    """A run with 20 problems of `sums`, which is trained on, and 3 of `counts`."""
    files = {"sums": tmp_path / "sums.jsonl", "counts": tmp_path / "counts.jsonl"}
    for name, count in (("sums", 20), ("counts", 3)):
        write_lines(
            files[name], [{"prompt": f"{name} {i}", "answer": f"{i // 5}"} for i in range(count)]
        )
    sources = {name: {"path": str(path)} for name, path in files.items()}
    config = {"data": {"sources": {"sums": sources["sums"]}}, "evaluation": {"sources": sources}}
    (tmp_path / "config.yaml").write_text(
        load_config([], [f"data.sources={json.dumps(config['data']['sources'])}",
                         f"evaluation.sources={json.dumps(sources)}", "model.hf_path=x"]).to_yaml()
    )  # fmt: skip
    rows = [
        # By name: counts first, whatever the configuration's order.
        {"step": 0, "correct": [4, 0, 2, *[0, 1] * 10]},
        {"step": 5, "correct": [4, 0, 3, *[4, 3] * 10]},
    ]
    shared = {"group_size": 4, "problems": list(range(23))}
    write_lines(tmp_path / "held_out.jsonl", [shared | row for row in rows])
    return tmp_path


def test_the_table(before_after, run_dir):
    title, _, sums, counts = before_after.table(read_run(run_dir)).splitlines()
    assert title == "| task | problems | one answer | before | after 5 steps | apart |"
    # 10 of 80 and 70 of 80 responses; 6 and 7 of 12.
    assert sums.startswith("| sums | 20 | 0.250 | 0.125 (0.0") and " | 0.875 (0.8" in sums
    assert (
        counts.startswith("| counts, not trained on | 3 | 1.000 | 0.500 (0.0")
        and "| 0.583 (" in counts
    )
    assert sums.endswith("| yes |") and counts.endswith("| no |")


def test_the_picture_has_a_line_for_each_task(before_after, run_dir):
    """Both end at the right; the higher share is the higher point."""
    trained = "reward/by_source/sums/accuracy"
    rows = [
        {"step": 0, "evaluation/avg@4": 0.2, "evaluation/by_source/sums/avg@4": 0.0,
         "evaluation/by_source/counts/avg@4": 0.5},
        {"step": 1, trained: 0.25},
        {"step": 5, trained: 0.5, "evaluation/avg@4": 0.9, "evaluation/by_source/sums/avg@4": 1.0,
         "evaluation/by_source/counts/avg@4": 0.75},
    ]  # fmt: skip
    write_lines(run_dir / "metrics.jsonl", rows)
    drawn = before_after.picture(read_run(run_dir))
    lines = re.findall(r'<polyline points="([^"]+)"', drawn)
    points = [[tuple(map(float, p.split(","))) for p in line.split()] for line in lines]
    of_training, of_sums, of_counts = points
    assert of_training[0][0] < of_training[1][0] and of_training[0][1] > of_training[1][1]
    assert of_sums[0][1] > of_counts[0][1] > of_counts[1][1] > of_sums[1][1]
    assert "counts, not trained on" in drawn and "held-out problems, avg@4" in drawn


def test_the_algorithms_are_compared_within_a_seed(
    compare_algorithms, run_dir, tmp_path, monkeypatch, capsys
):
    """Two seeds of VAPO; DAPO has one of them, a second one that is not finished, and no critic."""
    root = tmp_path / "runs"
    sums, counts = (f"evaluation/by_source/{name}/avg@4" for name in ("sums", "counts"))
    critic = ("critic/explained_variance", "critic/by_source/sums/explained_variance")
    for seed, name, end, explained in (
        (0, "vapo", 0.9, 0.25), (1, "vapo", 0.7, 0.75), (1, "dapo", 0.6, None),
        (0, "dapo", None, 0),
    ):  # fmt: skip
        rows = [{"step": 0, "evaluation/avg@4": 0.2, sums: 0.125, counts: 0.5},
                {"step": 1, "reward/correct_fraction": 0.25}]  # fmt: skip
        if end is not None:
            rows.append({"step": 5, "evaluation/avg@4": 0.9, sums: end, counts: 0.5})
        if explained:
            rows[1] |= dict.fromkeys(critic, explained)
        own = root / f"seed_{seed}" / name
        own.mkdir(parents=True)
        for file in ("config.yaml", "held_out.jsonl"):
            shutil.copy(run_dir / file, own / file)
        write_lines(own / "metrics.jsonl", rows)
    monkeypatch.setattr(sys, "argv", ["compare_algorithms", str(root)])
    assert compare_algorithms.main() == 0
    text = (root / "algorithms.md").read_text()
    assert text in capsys.readouterr().out and "(seeds: VAPO 2, DAPO 1)" in text
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    (of_sums,) = [row for row in rows if len(row) > 1 and row[1] == "sums"]
    vapo, other = "0.800 +- 0.141", "0.600 (-0.100, below in 1 of 1)"
    assert of_sums[2:-1] == ["0.125 +- 0.000", vapo, "2 of 2", other, "1 of 1"]
    of_critic = [row[2:-1] for row in rows if len(row) > 2 and row[1] == "explained variance"]
    assert of_critic == [["all", "+0.50 +- 0.35"], ["sums", "+0.50 +- 0.35"]]
    drawn = (root / "algorithms.svg").read_text()
    assert "VAPO" in drawn and "DAPO" in drawn and "explained variance, sums" in drawn


def test_algorithms_are_compared_at_equal_sampled_responses(compare_algorithms, run_dir, tmp_path):
    """Dynamic sampling has twice as many in a step: its second step is the other's fourth."""
    algorithm = read_run(run_dir).section("algorithm")
    per_step, per_group = algorithm["responses_per_step"], algorithm["group_size"]
    steps = {
        "grpo": [{"reward/correct_fraction": right} for right in (0.0, 0.0, 0.25, 0.75)],
        "dapo": [
            {"reward/correct_fraction": 1.0, "rollout/sampled_correct_fraction": right,
             "rollout/groups_sampled": 2 * per_step // per_group}
            for right in (0.0, 0.375, 1.0, 1.0)
        ],
    }  # fmt: skip
    for name, rows in steps.items():
        own = tmp_path / "seed_0" / name
        own.mkdir(parents=True)
        for file in ("config.yaml", "held_out.jsonl"):
            shutil.copy(run_dir / file, own / file)
        ends = [{"step": step, "evaluation/avg@4": 0.5} for step in (0, 5)]
        rows = [{"step": step, **row} for step, row in enumerate(rows, 1)]
        write_lines(own / "metrics.jsonl", [ends[0], *rows, ends[1]])
    text = compare_algorithms.algorithms_table(compare_algorithms.finished(tmp_path))
    cells = [[cell.strip() for cell in line.split("|")][1:4] for line in text.splitlines()]
    assert cells[0][2] == f"correct of the {2 * per_step}th to {4 * per_step}th"
    assert cells[2:] == [["DAPO", f"{8 * per_step}", "0.375"], ["GRPO", f"{4 * per_step}", "0.500"]]


def test_variants_of_vapo_are_compared_with_it(
    compare_algorithms, run_dir, tmp_path, monkeypatch, capsys
):
    """Means over the second half of the steps; held out over the task that is trained on alone."""
    for name, correct in (("vapo", (0.0, 0.5, 0.75)), ("lambda_1", (1.0, 0.25, 0.5))):
        own = tmp_path / "seed_3" / name
        own.mkdir(parents=True)
        for file in ("config.yaml", "held_out.jsonl"):
            shutil.copy(run_dir / file, own / file)
        rows = [
            {"step": step, "reward/correct_fraction": right, "critic/explained_variance": right}
            for step, right in zip((2, 3, 4), correct)
        ]
        held_out = {
            f"evaluation/{of}avg@4": 0.5 for of in ("", "by_source/sums/", "by_source/counts/")
        }
        ends = [{"step": step} | held_out for step in (0, 5)]
        write_lines(own / "metrics.jsonl", [ends[0], *rows, ends[1]])
    (tmp_path / "seed_3" / "unfinished").mkdir()
    monkeypatch.setattr(sys, "argv", ["compare_algorithms", str(tmp_path)])
    assert compare_algorithms.main() == 0
    lines = capsys.readouterr().out.split("one setting changed")[1].splitlines()
    rows = [[cell.strip() for cell in line.split("|")][1:-1] for line in lines if "|" in line][2:]
    before_after = sys.modules["before_after"]
    after = before_after.evaluated(read_run(tmp_path / "seed_3/vapo")).after["sums"]
    right = f"{sum(after) / len(after):.3f}"
    assert rows == [
        ["VAPO", "0.625", right, "+0.62", "-"],
        ["lambda_1", "0.375 (-0.250, below in 1 of 1)", f"{right} (+0.000, below in 0 of 1)",
         "+0.38", "-"],
    ]  # fmt: skip


def test_no_comparison_without_a_finished_run(compare_algorithms, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare_algorithms", str(tmp_path)])
    assert compare_algorithms.main() == 2
    assert "has no finished run seed_N/ALGORITHM; bash examples/run_" in capsys.readouterr().err


def test_no_table_of_other_problems_or_without_the_last_evaluation(before_after, run_dir):
    held_out = run_dir / "held_out.jsonl"
    first, second = held_out.read_text().splitlines(keepends=True)
    held_out.write_text(first)
    with pytest.raises(DataError, match="has 1 evaluations of 2 sources; .* let the run end"):
        before_after.table(read_run(run_dir))
    held_out.write_text(first + second)
    write_lines(run_dir / "sums.jsonl", [{"prompt": "sums", "answer": "1"}])
    with pytest.raises(DataError, match="has 23 problems and its files have 4; restore the files"):
        before_after.table(read_run(run_dir))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_quick_run(tmp_path):
    def quick(*arguments):
        return subprocess.run(
            ["bash", SCRIPT, "--quick", f"logging.run_dir={tmp_path}/run", *arguments], cwd=ROOT,
            text=True, capture_output=True, timeout=3500,
            env={**os.environ, "VAPO_PYTHON": sys.executable},
        )  # fmt: skip

    done = quick()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(5))
    assert rows[0]["evaluation/avg@1"] > 0.1 and "evaluation/avg@1" in rows[-1]
    for task in ("chain_sum", "gcd", "products"):
        assert rows[-1][f"reward/by_source/{task}/share"] == pytest.approx(1 / 3)
        assert f"| {task} |" in (run / "before_after.md").read_text()
    # A file for each of the pipeline's two stages.
    assert len([*run.glob("hf_export/*.safetensors")]) == 2 and (run / "report.html").exists()
