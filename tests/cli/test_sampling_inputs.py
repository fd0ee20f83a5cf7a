"""Which HF directory and which limits `vapo evaluate` and `vapo select` take; made-up directories.

Not exercised: sampling with them (tests/e2e/test_evaluate.py), and converting
(tests/weights/convert/).
"""

import json
import shlex
import shutil

import pytest

from tests import jsonl
from tests.weights.tiny_hf import write_tiny_model
from vapo_megatron.cli.evaluate import command as evaluate
from vapo_megatron.cli.sampling.directory import find_hf_directory
from vapo_megatron.cli.sampling.inputs import check, evaluation_config
from vapo_megatron.config import load_config
from vapo_megatron.errors import CheckpointError, ConfigError, DataError
from vapo_megatron.weights.hf_directory import note_export


def directory(path, *files):
    path.mkdir(parents=True, exist_ok=True)
    for file in files:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text("{}")
    return path


@pytest.fixture
def run_dir(tmp_path):
    """A run of two checkpoints, with an export of the first."""
    run_dir = tmp_path / "a run"
    for step in ("step_000002", "step_000143"):
        directory(run_dir / "checkpoints" / step, "actor/.metadata", "critic/.metadata")
    (run_dir / "checkpoints/latest").write_text("step_000143")
    (run_dir / "config.yaml").write_text(load_config([], ["model.hf_path=models/base"]).to_yaml())
    note_export(directory(run_dir / "hf_export", "config.json"), 2, [])
    return run_dir


def refused(checkpoint):
    with pytest.raises(CheckpointError) as caught:
        find_hf_directory(checkpoint)
    message = str(caught.value)
    assert message.startswith(f"--checkpoint={checkpoint}") and "\n" not in message
    return message


def command(message, after):
    """The words of the command that a message names between this text and the next comma."""
    return shlex.split(message.split(after, 1)[1].split(",")[0])


def test_an_export_that_is_older_than_the_latest_checkpoint_is_refused(run_dir):
    message = refused(run_dir)
    assert "hf_export is of step 2, but the latest checkpoint is of step 143" in message
    assert command(message, "export it with ") == [
        "vapo", "convert", "to-hf", "--megatron", f"{run_dir}/checkpoints/step_000143/actor",
        "--hf", "models/base", "--out", f"{run_dir}/hf_export", "--overwrite",
    ]  # fmt: skip
    assert f"evaluate step 2 with --checkpoint {run_dir}/hf_export" in message
    assert find_hf_directory(run_dir / "hf_export") == run_dir / "hf_export"


@pytest.mark.parametrize("step", [143, 144, None])
def test_an_export_of_the_latest_step_or_of_an_unknown_one_is_taken(run_dir, step):
    export = run_dir / "hf_export"
    (export / "export.json").unlink()
    note_export(export, step, [])
    assert find_hf_directory(run_dir) == export


def test_a_run_without_an_export(run_dir):
    shutil.rmtree(run_dir / "hf_export")
    words = command(refused(run_dir), "make it with ")
    assert words[4] == f"{run_dir}/checkpoints/step_000143/actor" and "--overwrite" not in words
    shutil.rmtree(run_dir / "checkpoints/step_000143/actor")
    assert "the run trains no actor; give its model.hf_path" in refused(run_dir)
    shutil.rmtree(run_dir / "checkpoints")
    assert "the run has neither hf_export nor a checkpoint yet" in refused(run_dir)


def test_a_run_of_adapters_needs_a_merge(run_dir):
    config = load_config([], ["model.hf_path=models/base", "model.lora.rank=2"])
    (run_dir / "config.yaml").write_text(config.to_yaml())
    for checkpoint, start in ((run_dir, "export it with "), (run_dir / "checkpoints", "one with ")):
        message = refused(checkpoint)
        out = f"{run_dir}/exports/step_000143_adapters"
        assert command(message, start)[4:] == [
            f"{run_dir}/checkpoints/step_000143/actor", "--hf", "models/base", "--out", out,
        ]  # fmt: skip
        assert f"{out}', merge that with peft (docs/lora.md, Files), " in message


def test_a_run_that_went_back_has_a_newer_export(run_dir):
    (run_dir / "checkpoints/latest").write_text("step_000002")
    assert find_hf_directory(run_dir) == run_dir / "hf_export"


@pytest.mark.parametrize(
    ("given", "step"),
    [
        ("checkpoints/step_000002", "step_000002"),
        ("checkpoints/step_000002/actor", "step_000002"),
        ("checkpoints", "step_000143"),
    ],
)
def test_a_checkpoint_of_a_run_names_the_command_that_makes_an_hf_directory(run_dir, given, step):
    message = refused(run_dir / given)
    assert command(message, "make one with ") == [
        "vapo", "convert", "to-hf", "--megatron", f"{run_dir}/checkpoints/{step}/actor",
        "--hf", "models/base", "--out", f"{run_dir}/exports/{step}",
    ]  # fmt: skip


def test_a_converted_directory_brings_its_own_configuration(tmp_path):
    converted = directory(tmp_path / "megatron", ".metadata", "config.json")
    words = command(refused(converted), "make one with ")
    assert words[3:] == ["--megatron", str(converted), "--out", f"{converted}_hf"]


def test_a_directory_that_is_none(tmp_path):
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "is neither an HF directory (config.json) nor a run directory" in refused(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of 64 positions."""
    sizes = dict(num_layers=1, hidden=128, vocab=64)
    hf = write_tiny_model(tmp_path_factory.mktemp("limits") / "hf", **sizes)
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    return hf


def limits(checkpoint, data, *overrides):
    """(of prompts, of responses)."""
    config = evaluation_config(checkpoint, ["rollout.stop_token_ids=[7]", *overrides], None)
    evaluation = check(checkpoint, data, config)
    assert evaluation.header["max_response_tokens"] == evaluation.rollout.max_response_tokens
    return evaluation.rollout.max_prompt_tokens, evaluation.rollout.max_response_tokens


def test_limits_that_are_not_set_are_the_datas_and_the_models(model, tmp_path):
    data = tmp_path / "test.jsonl"
    prompts = ["w9", " ".join(["w9"] * 10)]
    jsonl.write(data, ({"prompt": p, "answer": "1"} for p in prompts))
    prompt, response = "rollout.max_prompt_tokens", "rollout.max_response_tokens"
    assert limits(model, data) == (10, 54)
    assert limits(model, data, f"{response}=20") == (10, 20)
    assert limits(model, data, f"{prompt}=16") == (16, 48)
    with pytest.raises(DataError, match=f"has 10 tokens, more than {prompt}=8"):
        limits(model, data, f"{prompt}=8")
    with pytest.raises(ConfigError, match=f"{prompt}=10 .* {response}=55 = 65 exceeds the model's"):
        limits(model, data, f"{response}=55")
    # A run's limit of prompts is its training data's; that of responses is what it was trained for.
    run_dir = tmp_path / "run"
    trained = load_config([], [f"{prompt}=4", f"{response}=12"])
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(trained.to_yaml())
    (run_dir / "hf_export").symlink_to(model)
    assert limits(run_dir, data) == (10, 12)
    with pytest.raises(DataError, match=f"has 10 tokens, more than {prompt}=9"):
        limits(run_dir, data, f"{prompt}=9")


def test_no_prompt_may_fill_the_model(model, tmp_path):
    data = tmp_path / "test.jsonl"
    jsonl.write(data, [{"prompt": " ".join(["w9"] * 64), "answer": "1"}])
    with pytest.raises(ConfigError, match="rollout.max_prompt_tokens=64 .* exceeds the model's"):
        limits(model, data)


def test_samples_do_not_go_where_their_summary_does(tmp_path, capsys):
    arguments = ["--checkpoint", "hf", "--data", "a.jsonl", "--out", str(tmp_path / "a.json")]
    assert evaluate.main(arguments) == 2
    assert "a.json must not end in .json: the summary, of the same name" in capsys.readouterr().err
