"""`vapo evaluate` with vLLM: what it writes, that it goes on, and that replicas change nothing.

A tiny random model whose every token is a boxed digit, so that some answers are right. Not
exercised: a GPU, vLLM's tensor parallelism, several nodes.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from tests import jsonl
from tests.e2e.started import kill_once
from tests.e2e.test_run import ROOT, ended, run
from tests.rollout.tiny_tokenizer import SPECIAL, write_words
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.cli.evaluate import command as evaluate
from vapo_megatron.config import EvaluationConfig, load_config
from vapo_megatron.errors import CheckpointError, ConfigError

TOOL = ("-m", "vapo_megatron", "evaluate")
NUM_PROBLEMS, SAMPLES = 7, 6
OPTIONS = [
    "--samples", str(SAMPLES), "--top-p", "0.9", "--batch", "2",
    "rollout.max_prompt_tokens=16", "rollout.max_response_tokens=24", "model.dtype=float32",
    "rollout.kv_cache_bytes=16777216", "rollout.max_num_sequences=8", "reward.num_workers=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of 64 tokens: two special ones, the stop token, and 61 boxed digits 0..4."""
    path = tmp_path_factory.mktemp("base") / "model"
    write_tiny_hf(path, num_layers=2, heads=2, kv_heads=2, vocab=64)
    return write_words(path, [*SPECIAL, *(f"\\boxed{{{i % 5}}}{i}" for i in range(3, 64))])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "held_out.jsonl"
    rows = [
        {"prompt": " ".join(f"\\boxed{{{j % 5}}}{j}" for j in (3 + i, 9, 20 + i)), "answer": i % 5}
        for i in range(NUM_PROBLEMS)
    ]
    jsonl.write(path, rows)
    return path


def arguments(checkpoint, data, out):
    return ["--checkpoint", str(checkpoint), "--data", str(data), "--out", str(out), *OPTIONS]


def evaluate_three_times(out, given):
    """From beginning to end; the same again; and with another temperature."""

    def times():
        return [p.stat().st_mtime_ns for p in Path(out).glob("*.jsonl")]

    codes = [evaluate.main(given)]
    written = times()
    codes += [evaluate.main(given), evaluate.main([*given, "--temperature", "0.5"])]
    print(codes, written == times())
    return 0


@pytest.fixture(scope="module")
def straight(launch, checkpoint, data, tmp_path_factory):
    """(directory, what was printed) of evaluate_three_times."""
    out = tmp_path_factory.mktemp("out")
    given = arguments(checkpoint, data, out / "straight.jsonl")
    return out, ended(launch(evaluate_three_times, str(out), given))


def read(path):
    header, *lines = jsonl.read(path)
    return header, lines


def test_every_sample_is_written_and_judged(straight, checkpoint, data):
    header, lines = read(straight[0] / "straight.jsonl")
    assert header["evaluation"] == 1 and header["checkpoint"] == str(checkpoint)
    assert (header["samples"], header["top_p"], header["temperature"]) == (SAMPLES, 0.9, 1.0)
    assert [line["prompt_index"] for line in lines] == list(range(NUM_PROBLEMS))
    responses = [r for line in lines for r in line["responses"]]
    assert len({r["text"] for r in responses}) > len(responses) // 2, "samples differ"
    for line in lines:
        assert [r["sample"] for r in line["responses"]] == list(range(SAMPLES))
        for r in line["responses"]:
            # The last boxed digit is the answer.
            last = r["text"].rpartition("\\boxed{")[2][:1] or None
            assert r["answer"] == last
            assert (r["status"] == "correct") == (last == line["answer"])
            assert r["truncated"] == (r["num_tokens"] == 24)
    assert {r["status"] for r in responses} >= {"correct", "wrong"}


def test_the_table_and_the_summary_say_what_the_samples_say(straight):
    out, done = straight
    _, lines = read(out / "straight.jsonl")
    summary = json.loads((out / "straight.json").read_text())["statistics"]
    flat = [r for line in lines for r in line["responses"]]
    accuracy = sum(r["status"] == "correct" for r in flat) / len(flat)
    expected = {
        "avg@6": accuracy,
        "pass@6": sum(
            any(r["status"] == "correct" for r in line["responses"]) for line in lines
        ) / NUM_PROBLEMS,
        "response_length_mean": sum(r["num_tokens"] for r in flat) / len(flat),
        "truncated_fraction": sum(r["truncated"] for r in flat) / len(flat),
    }  # fmt: skip
    for name, value in expected.items():
        assert summary[name]["value"] == pytest.approx(value)
        assert summary[name]["low"] <= value <= summary[name]["high"]
    assert set(summary) == {*expected, "pass@2", "pass@4", "majority@6"}
    assert "avg@6" in done.stdout and f"{accuracy:.4f}" in done.stdout
    assert f"responses {NUM_PROBLEMS * SAMPLES} / {NUM_PROBLEMS * SAMPLES}" in done.stderr


def test_a_finished_evaluation_is_summed_up_again_and_left_alone(straight):
    assert straight[1].stdout.strip().endswith("[0, 0, 2] True")
    assert straight[1].stdout.count("avg@6") == 2
    ends = re.findall(r"responses (\d+) / \1\b", straight[1].stderr)
    assert ends == [str(NUM_PROBLEMS * SAMPLES)], "nothing was sampled again"


def test_other_settings_do_not_go_on_with_a_file(straight):
    lines = [line for line in straight[1].stderr.splitlines() if line.startswith("evaluate:")]
    assert len(lines) == 1
    assert "its temperature is 1.0, here it is 0.5; give another --out" in lines[0]


def test_a_run_directory_is_its_export_and_its_configuration(checkpoint, tmp_path):
    from vapo_megatron.cli.sampling.directory import find_hf_directory
    from vapo_megatron.cli.sampling.inputs import evaluation_config

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    trained = ["seed=7", "parallel.world_size=4", "parallel.tensor_model_parallel_size=2"]
    trained += ["parallel.sequence_parallel=true", "parallel.pipeline_model_parallel_size=2"]
    trained += ["parallel.virtual_pipeline_model_parallel_size=2"]
    trained += ["model.hf_path=models/base", "evaluation.samples=5"]
    (run_dir / "config.yaml").write_text(load_config([], trained).to_yaml())
    with pytest.raises(CheckpointError, match="neither hf_export nor a checkpoint yet"):
        find_hf_directory(run_dir)
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints/latest").write_text("step_000040")
    with pytest.raises(
        CheckpointError,
        match=r"vapo convert to-hf --megatron \S+/run/checkpoints/step_000040/actor "
        r"--hf models/base --out \S+/run/hf_export",
    ):
        find_hf_directory(run_dir)
    (run_dir / "hf_export").symlink_to(checkpoint)
    assert find_hf_directory(run_dir) == run_dir / "hf_export"
    assert find_hf_directory(checkpoint) == checkpoint
    with pytest.raises(CheckpointError, match="neither an HF directory .* nor a run directory"):
        find_hf_directory(tmp_path)
    config = evaluation_config(
        run_dir, ["evaluation.top_p=0.8", "parallel.timeout_seconds=9000"], None
    )
    assert (config.seed, config.evaluation.samples, config.evaluation.top_p) == (7, 5, 0.8)
    assert config.parallel.world_size == 1 and config.parallel.timeout_seconds == 9000
    assert evaluation_config(checkpoint, [], None).evaluation.samples == 32
    four = ["rollout.tensor_model_parallel_size=4"]
    with pytest.raises(ConfigError, match="must divide the number of processes, 1; set it"):
        evaluation_config(checkpoint, four, 1)
    assert evaluation_config(checkpoint, four, None).parallel.world_size == 4, "one replica"
    # Neither the run's layout nor its mini-batches restrict how many processes evaluate it.
    trained += ["algorithm.mini_batch_size=2"]
    (run_dir / "config.yaml").write_text(load_config([], trained).to_yaml())
    for directory in (checkpoint, run_dir):
        config = evaluation_config(directory, four, 12)
        assert config.parallel.world_size == 12
        assert config.rollout.tensor_model_parallel_size == 4
    with pytest.raises(ConfigError, match="rollout.top_p=0.5 must be 1"):
        evaluation_config(checkpoint, ["rollout.top_p=0.5"], None)


def test_each_checkpoint_has_a_file_of_its_own(tmp_path, monkeypatch):
    from vapo_megatron.cli.evaluate.command import default_out

    monkeypatch.chdir(tmp_path)
    paths = ["runs/tiny/seed_0/vapo", "runs/tiny/seed_1/vapo", "/data/models/base"]
    found = [default_out(Path(path), Path("a/b.parquet")) for path in paths]
    assert [str(path) for path in found] == [
        "runs/evaluation/runs/tiny/seed_0/vapo/b.jsonl",
        "runs/evaluation/runs/tiny/seed_1/vapo/b.jsonl",
        "runs/evaluation/data/models/base/b.jsonl",
    ]


def test_the_help_names_the_defaults_and_whose_they_are():
    text = " ".join(evaluate._parser().format_help().split())
    for name, metavar in (("samples", "K"), ("temperature", "T"), ("top_p", "P"), ("top_k", "K")):
        flag = f"--{name.replace('_', '-')} {metavar} "
        default = EvaluationConfig.model_fields[name].default
        shown = text.rpartition(flag)[2].partition(" --")[0]
        assert f"default: the run's; of an HF directory {default}" in shown, flag


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_torn_file_becomes_the_same_file(straight, checkpoint, data, tmp_path, share):
    whole, torn = straight[0] / "straight.jsonl", tmp_path / "torn.jsonl"
    content = whole.read_bytes()
    torn.write_bytes(content[: int(len(content) * share)])
    run([sys.executable, *TOOL, *arguments(checkpoint, data, torn)])
    assert torn.read_bytes() == content
    assert torn.with_suffix(".json").read_bytes() == whole.with_suffix(".json").read_bytes()


def killed(command, out):
    """Kill a command with two replicas after a problem's samples are on disk; how many are then."""

    def written():
        return sum(p.read_bytes().count(b"\n") - 1 for p in out.parent.glob(f"{out.name}.part*"))

    kill_once(lambda: written() >= 1, command, out.with_suffix(".log"))
    return written()


@pytest.mark.slow
def test_two_replicas_killed_and_started_again_give_the_same_file(
    straight, checkpoint, data, tmp_path
):
    out = tmp_path / "two.jsonl"
    start = [sys.executable, "-m", "vapo_megatron", "evaluate", "--nproc=2"]
    command = [*start, *arguments(checkpoint, data, out)]
    before = killed(command, out)
    assert 1 <= before < NUM_PROBLEMS and read(out)[1] == [], "killed before the end"
    done = run(command)
    expected = read(straight[0] / "straight.jsonl")
    assert read(out) == expected, "neither the replicas nor the kill changed anything"
    assert done.stdout.count("avg@6") == 1
    left = NUM_PROBLEMS - before
    assert f"responses {left * SAMPLES} / {left * SAMPLES}" in done.stderr, "only what was missing"
    again = run([sys.executable, *TOOL, *arguments(checkpoint, data, out)])
    assert again.stdout.count("avg@6") == 1 and read(out) == expected


@pytest.mark.slow
def test_a_runs_own_evaluation_says_the_same(checkpoint, data, tmp_path):
    """A run of no steps evaluates what it starts from, and exports it."""
    run_dir, out = tmp_path / "run", tmp_path / "out.jsonl"
    settings = [f"evaluation.samples={SAMPLES}", "evaluation.top_p=0.9", f"evaluation.path={data}"]
    settings += [f"model.hf_path={checkpoint}", f"data.train_path={data}", "parallel.world_size=1"]
    settings += ["parallel.tensor_model_parallel_size=1", f"logging.run_dir={run_dir}"]
    settings += ["algorithm.policy_steps=0", "algorithm.value_pretraining_steps=0"]
    settings += [option for option in OPTIONS if "." in option and "=" in option]
    train = [sys.executable, "-m", "vapo_megatron.train", "--config"]
    run([*train, ROOT / "examples/configs/tiny.yaml", *settings])
    row = jsonl.read(run_dir / "metrics.jsonl")[0]
    run([sys.executable, *TOOL, "--checkpoint", run_dir, "--data", data, "--out", out])
    found = json.loads(out.with_suffix(".json").read_text())["statistics"]
    names = ["avg@6", "pass@6", "majority@6", "response_length_mean", "truncated_fraction"]
    assert {n: row[f"evaluation/{n}"] for n in names} == {n: found[n]["value"] for n in names}


@pytest.mark.slow
def test_a_mistake_under_torchrun_is_one_line(checkpoint, data, tmp_path):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    command = [*start, *TOOL, *arguments(checkpoint, data, broken)]
    done = run(command, code=1)
    told = [line for line in done.stderr.splitlines() if line.startswith("evaluate:")]
    assert len(told) == 1 and "is not an evaluation's file" in told[0]
    assert broken.read_text() == "{}\n"
