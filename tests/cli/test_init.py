"""vapo init: what it writes passes a dry run. Not exercised: a machine that has GPUs."""

import json

import pytest
import yaml

from tests.models.qwen25 import config_json
from tests.weights.tiny_hf import write_tiny_model
from vapo_megatron.cli import init
from vapo_megatron.cli.main import main
from vapo_megatron.config import load_config
from vapo_megatron.errors import UserError


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with a model, and problems under another name of column."""
    sizes = dict(num_layers=1, heads=1, kv_heads=1, hidden=32, vocab=64)
    write_tiny_model(tmp_path / "a: model", **sizes)
    rows = [{"problem": "w3 " * (70 + i), "answer": str(i)} for i in range(4)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "_gpus", lambda: [])
    return tmp_path


def test_what_is_written_passes_a_dry_run(place, capsys):
    assert main(["init", "--model", "a: model", "--data", "mine.jsonl"]) == 0
    assert capsys.readouterr().out == "run.yaml\n"
    config = load_config("run.yaml")
    assert (config.model.hf_path, config.model.dtype) == ("a: model", "float32")
    # 73 tokens are the longest prompt; responses get the rest of the positions, or 512.
    assert config.rollout.max_prompt_tokens == 128 and config.data.prompt_column == "problem"
    assert config.rollout.max_response_tokens <= 512 and config.logging.run_dir == "runs/run"
    assert config.parallel.max_tokens_per_microbatch == 2048
    assert main(["train", "--config", "run.yaml", "--dry-run"]) == 0
    assert "mine.jsonl, 4 rows: judged by math (4)" in capsys.readouterr().out
    text = (place / "run.yaml").read_text()
    assert max(map(len, text.splitlines())) <= 100 and text.count("  # ") > 8


def test_without_data_the_rest_is_there_and_a_file_is_kept(place, capsys):
    assert main(["init", "--model", "a: model", "--out", "new/first.yaml"]) == 0
    assert load_config("new/first.yaml").data.train_path is None
    assert main(["init", "--model", "a: model", "--out", "new/first.yaml"]) == 2
    assert "--out=new/first.yaml exists; remove it" in capsys.readouterr().err
    assert main(["init", "--model", "a: model", "--out", "other.yaml", "--gpus", "-1"]) == 2
    assert "argument --gpus: -1 must be at least 0" in capsys.readouterr().err


def test_what_a_dry_run_refuses_is_not_written(place, capsys):
    with (place / "mine.jsonl").open("a") as file:
        file.write('{"problem": "w3", "answer": "???"}\n')
    assert main(["init", "--model", "a: model", "--data", "mine.jsonl"]) == 2
    assert "row 4 (from 0) has the answer '???'" in capsys.readouterr().err
    assert not (place / "run.yaml").exists()
    (place / "mine.jsonl").write_text('{"text": "w3"}\n')
    assert main(["init", "--model", "a: model", "--data", "mine.jsonl"]) == 2
    assert "prompt" in capsys.readouterr().err


def test_gpus_get_the_layout_that_a_plan_chooses(tmp_path):
    model = tmp_path / "Qwen2.5-7B"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", **config_json("7B")}))
    out = tmp_path / "run.yaml"
    tree = yaml.safe_load(init.configuration(model, None, 8, out))
    assert tree["parallel"]["world_size"] == 8 and tree["model"]["dtype"] == "bfloat16"
    out.write_text(yaml.safe_dump(tree))
    config = load_config(out)
    assert config.rollout.max_response_tokens == 4096
    assert config.algorithm.responses_per_step == 512
    with pytest.raises(UserError, match="fit"):
        init.configuration(model, None, 1, tmp_path / "other.yaml")
