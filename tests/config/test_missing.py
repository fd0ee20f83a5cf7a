"""What is said of a path that does not exist. Nothing is asked of the hub."""

import pytest

from vapo_megatron.config.missing import hub_id, missing_data, missing_model

IDS = (
    "Qwen/Qwen2.5-0.5B", "hf://Qwen/Qwen2.5-0.5B", "https://huggingface.co/Qwen/Qwen2.5-0.5B",
    "https:/huggingface.co/Qwen/Qwen2.5-0.5B/tree/main", "hf.co/Qwen/Qwen2.5-0.5B/",
    "huggingface.co/datasets/Qwen/Qwen2.5-0.5B",
)  # fmt: skip
NONE = (
    "models/Qwen2.5-0.5B", "Qwen2.5-0.5B", "/data/Qwen/Qwen2.5-0.5B", "./Qwen/Qwen2.5-0.5B",
    "~/Qwen/Qwen2.5-0.5B", "a/b/c", "mine/train.jsonl", "here/one", "made/yet",
)  # fmt: skip


def test_ids_and_addresses_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here/one").mkdir(parents=True)
    (tmp_path / "made").mkdir()
    assert [hub_id(text) for text in IDS] == ["Qwen/Qwen2.5-0.5B"] * len(IDS)
    assert [hub_id(text) for text in NONE] == [None] * len(NONE)


SAID = {
    "Qwen/Qwen2.5-0.5B": (
        "model.hf_path=Qwen/Qwen2.5-0.5B is a name on the Hugging Face hub, not a directory here; "
        "run `hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B` and set "
        "model.hf_path=models/Qwen2.5-0.5B"
    ),
    "models/Qwen3-4B": (
        "model.hf_path=models/Qwen3-4B does not exist; set model.hf_path to an existing path, or "
        "run `hf download Qwen/Qwen3-4B --local-dir models/Qwen3-4B`"
    ),
    "models/m": "model.hf_path=models/m does not exist; set model.hf_path to an existing path",
    "~/mine": (
        "model.hf_path=~/mine does not exist: ~ is not expanded here; set model.hf_path=/me/mine"
    ),
}


@pytest.mark.parametrize("path", SAID)
def test_a_model_that_is_missing(path, monkeypatch):
    monkeypatch.setenv("HOME", "/me")
    assert missing_model("model.hf_path", path) == SAID[path]


def test_data_that_is_missing():
    assert missing_data("data.train_path", "openai/gsm8k") == (
        "data.train_path=openai/gsm8k is a name on the Hugging Face hub, not a file here; run "
        "`vapo prepare --data openai/gsm8k --tokenizer MODEL --out data/gsm8k.parquet` and set "
        "data.train_path=data/gsm8k.parquet"
    )
    assert missing_data("evaluation.path", "data/a.jsonl") == (
        "evaluation.path=data/a.jsonl does not exist; set evaluation.path to an existing path"
    )
