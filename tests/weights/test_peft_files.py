"""PEFT directories that are refused, and what tells one base model from another."""

import dataclasses
import json
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weights.peft_directory import load_with_peft, write_adapters
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.config.lora import TARGETS, LoraConfig
from vapo_megatron.errors import CheckpointError, ConfigError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.weights.adapter_table import targets_of
from vapo_megatron.weights.peft_files import BASE_FILE, base_digest, check_adapters

LORA = LoraConfig(rank=4, alpha=6)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_hf(tmp_path_factory.mktemp("base") / "hf", num_layers=1)


@pytest.fixture
def adapter(base, tmp_path):
    directory = tmp_path / "adapter"
    write_adapters(base, directory)
    return directory


def change(directory, **fields):
    file = directory / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def refused(base, adapter, lora=LORA):
    with pytest.raises(CheckpointError) as error:
        check_adapters(adapter, read_model_shape(base), lora, base)
    return str(error.value)


def test_what_peft_writes_is_taken(base, adapter):
    check_adapters(adapter, read_model_shape(base), LORA, base)


def test_another_rank_alpha_or_targets(base, adapter):
    assert "its r is 4, which model.lora.rank=8 must equal; set rank=4" in refused(
        base, adapter, LoraConfig(rank=8, alpha=6)
    )
    assert "lora_alpha is 6, which model.lora.alpha=32 must equal; set alpha=6" in refused(
        base, adapter, LoraConfig(rank=4)
    )
    some = LORA.model_copy(update={"targets": ["q_proj"]})
    assert "model.lora.targets asks for q_proj; set targets=[down_proj," in refused(
        base, adapter, some
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("use_dora", True), ("use_rslora", True), ("bias", "all"), ("rank_pattern", {"q_proj": 2}),
     ("modules_to_save", ["lm_head"]), ("layer_replication", [[0, 1], [0, 1]]),
     ("init_lora_weights", "pissa")],
)  # fmt: skip
def test_more_than_two_matrices(base, adapter, field, value):
    change(adapter, **{field: value})
    told = refused(base, adapter)
    assert f"adapter_config.json: {field}={value!r} is not supported" in told
    assert "merge that adapter into its model" in told


def test_no_lora_and_no_file(base, adapter):
    change(adapter, peft_type="IA3")
    assert "peft_type must be LORA" in refused(base, adapter)
    (adapter / "adapter_config.json").unlink()
    assert "adapter_config.json is missing; give a directory that peft has saved" in refused(
        base, adapter
    )


def test_no_variant_of_peft_is_forgotten(base, adapter):
    fields = dataclasses.fields(peft.LoraConfig)
    variants = [each.name for each in fields if each.metadata.get("is_lora_variant")]
    assert "use_dora" in variants
    for name in variants:
        change(adapter, **{name: {"a": 1}})
        assert f"{name}={{'a': 1}} is not supported" in refused(base, adapter)
        change(adapter, **{name: None})


@pytest.mark.parametrize("start", ["eva", "gaussian", "pissa", "olora"])
def test_what_changes_the_base_is_refused_and_nothing_else(start, base, adapter):
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        before = load_with_peft(base, adapter)(ids).logits
        change(adapter, init_lora_weights=start)
        error = (load_with_peft(base, adapter)(ids).logits - before).abs().max()
    if error == 0:
        check_adapters(adapter, read_model_shape(base), LORA, base)
    else:
        assert "peft changes the base model's weights" in refused(base, adapter)
    assert (error == 0) == (start in ("eva", "gaussian"))


def test_matrices_that_have_no_adapter_here(base, adapter):
    file = adapter / "adapter_model.safetensors"
    name = "base_model.model.model.embed_tokens.lora_embedding_A"
    save_file({**load_file(file), name: torch.zeros(4, 300)}, file)
    told = refused(base, adapter)
    assert (
        "has adapters of embed_tokens, which are none of q_proj" in told and "targets=" not in told
    )


def test_a_target_named_twice_counts_once(base, adapter):
    twice = LORA.model_copy(update={"targets": ["k_proj", "q_proj", *TARGETS]})
    check_adapters(adapter, read_model_shape(base), twice, base)
    assert sorted(targets_of(read_model_shape(base), twice)) == sorted(TARGETS)


def test_adapters_of_a_larger_model(base, adapter, tmp_path):
    other = write_tiny_hf(tmp_path / "other", num_layers=1, ffn=160)
    told = refused(other, adapter)
    assert "gate_proj.lora_B.weight: expected [160, 4], found [96, 4] F32: it is of another" in told


def test_adapters_of_other_weights(base, adapter, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert base_digest(base) == base_digest(base) != base_digest(other)
    noted = {"directory": "models/before", "digest": base_digest(other)}
    (adapter / BASE_FILE).write_text(json.dumps(noted))
    told = refused(base, adapter)
    assert "has adapters of models/before, whose weights are not those of model.hf_path=" in told
    (adapter / BASE_FILE).write_text(json.dumps(noted | {"digest": None}))
    check_adapters(adapter, read_model_shape(base), LORA, base)


def test_experts_have_none(tmp_path):
    shape = read_model_shape(write_tiny_hf(tmp_path / "hf", family="qwen3_moe"))
    with pytest.raises(ConfigError, match="gate_proj would be of experts, which have no adapters"):
        targets_of(shape, LORA.model_copy(update={"targets": ["q_proj", "gate_proj"]}))
    assert targets_of(shape, LORA) == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert len(targets_of(dataclasses.replace(shape, experts=None), LORA)) == 7
