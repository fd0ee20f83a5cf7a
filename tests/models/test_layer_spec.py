"""Which layers are chosen, and what is refused, with stand-ins for what is installed.

Does not exercise Transformer Engine, whose layers tests/gpu/test_transformer_engine.py builds.
"""

import dataclasses
import importlib.util

import pytest
import torch

from tests.models import built
from tests.models.test_rope import SHAPE
from vapo_megatron.config import ModelConfig, ParallelConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.models import build, layer_spec
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.models.layer_spec import check_fp8, uses_transformer_engine
from vapo_megatron.models.rope import rope_frequencies
from vapo_megatron.parallel.minibatches import FP8_MULTIPLE

# isort: split
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_align_size


@pytest.fixture
def machine(monkeypatch):
    """Return a function that says what is installed; called without arguments: everything."""

    def has(gpu=True, installed=True, imports=True, new=True, capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *_: name if installed else None
        )
        monkeypatch.setattr(layer_spec.extension, "HAVE_TE", imports)
        monkeypatch.setattr(layer_spec, "is_te_min_version", lambda version: new)

    return has


def test_auto_takes_transformer_engine_in_bfloat16_where_it_works(machine):
    machine()
    assert uses_transformer_engine(ModelConfig())
    assert uses_transformer_engine(ModelConfig(layer_spec="transformer_engine"))
    assert not uses_transformer_engine(ModelConfig(dtype="float32"))
    assert not uses_transformer_engine(ModelConfig(layer_spec="local"))
    machine(gpu=False)
    assert not uses_transformer_engine(ModelConfig())
    machine(installed=False, imports=False)
    assert not uses_transformer_engine(ModelConfig())


def test_an_installation_that_cannot_be_imported_is_not_passed_over(machine):
    machine(imports=False)
    for spec in ("auto", "transformer_engine"):
        with pytest.raises(ConfigError, match=f"layer_spec={spec}: .* cannot be imported; fix"):
            uses_transformer_engine(ModelConfig(layer_spec=spec))
    assert not uses_transformer_engine(ModelConfig(layer_spec="local"))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"installed": False}, "model.fp8=hybrid needs Transformer Engine, which is not installed"),
        ({"gpu": False}, "model.fp8=hybrid needs Transformer Engine, .* or there is no GPU"),
        ({"new": False}, "model.fp8=hybrid needs transformer-engine 2.2 or newer"),
        ({"capability": (8, 0)}, "model.fp8=hybrid needs a GPU of compute capability 8.9"),
    ],
)
def test_fp8_needs(machine, missing, message):
    machine(**missing)
    with pytest.raises(ConfigError, match=message):
        check_fp8(SHAPE, ModelConfig(fp8="hybrid"), 1)
    check_fp8(SHAPE, ModelConfig(), 1)


@pytest.mark.parametrize(
    ("changes", "tp_size", "message"),
    [
        # 64 columns; (2 + 2 * 1) * 32 = 128 rows, 2 * 32 = 64 of the query: fine up to TP 4.
        ({}, 8, "query rows, 8 with .*tensor_model_parallel_size=8, to be a multiple of 16"),
        ({"ffn_hidden_size": 96}, 4, "rank's intermediate_size, 24 with"),
        ({"hidden_size": 72}, 1, "model's hidden_size, 72 with"),
        ({"head_dim": 4}, 2, "query, key and value rows, 8 with"),
    ],
)
def test_fp8_divides_every_matrix(machine, changes, tp_size, message):
    machine()
    with pytest.raises(ConfigError, match=message):
        check_fp8(dataclasses.replace(SHAPE, **changes), ModelConfig(fp8="e4m3"), tp_size)
    for size in (1, 2, 4):
        check_fp8(SHAPE, ModelConfig(fp8="e4m3"), size)


def test_fp8_multiplies_what_megatron_core_says():
    assert get_fp8_align_size(Fp8Recipe.tensorwise) == FP8_MULTIPLE


@pytest.mark.parametrize("fp8", ["hybrid", "e4m3", None])
def test_fp8_settings(monkeypatch, fp8):
    """No history of scales, no casts kept, and parameters that stay in bfloat16."""
    monkeypatch.setattr(build, "check_fp8", lambda *_: None)
    settings = build.transformer_config(SHAPE, ModelConfig(fp8=fp8), ParallelConfig())
    assert settings.fp8 == fp8 and not settings.fp8_param
    assert fp8 is None or settings.fp8_recipe == Fp8Recipe.tensorwise
    assert settings.disable_parameter_transpose_cache == (fp8 is not None)
    assert settings.params_dtype is torch.bfloat16 and not settings.fp8_dot_product_attention


def test_a_gpus_flash_attention_must_have_the_models_width(monkeypatch):
    shape = dataclasses.replace(SHAPE, head_dim=36)
    build.transformer_config(shape, ModelConfig(), ParallelConfig())
    monkeypatch.setattr(build, "uses_flash_attention", lambda dtype: dtype != torch.float32)
    with pytest.raises(ConfigError, match="head_dim=36 must be a multiple of 8"):
        build.transformer_config(shape, ModelConfig(), ParallelConfig())
    build.transformer_config(shape, ModelConfig(dtype="float32"), ParallelConfig())
    monkeypatch.setattr(build, "uses_transformer_engine", lambda model: True)
    build.transformer_config(shape, ModelConfig(), ParallelConfig())


def test_compiled_fusions_need_a_compiler(monkeypatch, tmp_path):
    (tmp_path / "Python.h").write_text("")
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: "/bin/" + name)
    fused = build._fusions(True, False)
    assert fused["bias_activation_fusion"] and fused["bias_dropout_fusion"]
    assert not fused["apply_rope_fusion"] and build._fusions(True, True)["apply_rope_fusion"]
    assert not any(build._fusions(False, True).values())
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert not any(build._fusions(True, False).values())
    monkeypatch.setenv("CC", "cc")
    assert build._fusions(True, False)["bias_activation_fusion"]
    (tmp_path / "Python.h").unlink()
    assert not any(build._fusions(True, False).values())


def _rotary_tables():
    """Lengths of the tables for sequences of 1 to 22528 tokens, and the angles of the longest."""
    from megatron.core.packed_seq_params import PackedSeqParams

    table = layer_spec.RotaryTable(8, torch.tensor([1.0, 0.5, 0.25, 0.125]))
    lengths = {}
    for longest in (1, 1024, 1025, 10_240, 22_528):
        packing = PackedSeqParams(max_seqlen_q=longest, max_seqlen_kv=longest)
        lengths[longest] = table.get_rotary_seq_len(None, None, None, None, packing)
    return lengths, table(lengths[22_528], packed_seq=True)


def _rotary_of_a_model(hf_path):
    """What a model of Transformer Engine's layers would rotate with; its layers are local here."""
    from unittest import mock

    local = layer_spec.block_spec

    def spec(config, rotary, *, transformer_engine, shards, vp_stage):
        assert transformer_engine and shards is None
        return local(config, rotary, transformer_engine=False, vp_stage=vp_stage)

    with (
        mock.patch.object(build, "uses_transformer_engine", lambda model: True),
        mock.patch.object(build, "block_spec", spec),
    ):
        (chunk,) = built.build(hf_path, built.Layout()).chunks
    rotary = chunk.rotary_pos_emb
    return type(rotary).__name__, rotary.inv_freq, rope_frequencies(read_model_shape(hf_path))


def test_rotary_tables_have_few_lengths(workers, tmp_path):
    ((lengths, angles),) = workers.run(1, _rotary_tables)
    assert lengths == {1: 1024, 1024: 1024, 1025: 2048, 10_240: 16_384, 22_528: 32_768}
    # Position p turns by p * frequency, in both halves.
    assert angles.shape == (32_768, 1, 1, 8)
    assert angles[10_000, 0, 0].tolist() == 2 * [10_000, 5_000, 2_500, 1_250]
    ((name, found, expected),) = workers.run(1, _rotary_of_a_model, built.write_hf(tmp_path))
    assert name == "RotaryTable" and torch.equal(found, expected)
