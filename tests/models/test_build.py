"""What build_model returns on each rank: parameters, roles, settings, tied embeddings, recompute.

Does not exercise Transformer Engine's layers (tests/gpu/test_transformer_engine.py does) nor what
the models compute: test_parity.py does, and tests/distributed for pipelines.
"""

import json
from collections import Counter

import pytest
import torch

from tests.models import published
from tests.models.built import Layout, build, call, make_config, write_hf
from tests.models.qwen25 import COUNTS, SHAPES, config_json
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.build import gather_hidden, output_weight, transformer_config
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.weights.table import parameter_count


def count_on_meta(hf_paths, layout, roles=("actor", "critic")):
    """Return for each actor and critic this rank's parameters, and the replicated among them."""
    counts = []
    for hf_path in hf_paths:
        for role in roles:
            model = build(hf_path, layout, role, device="meta", make_vocab_size_divisible_by=128)
            (chunk,) = model.chunks
            sizes = {name: p.numel() for name, p in chunk.named_parameters() if p.is_meta}
            assert len(sizes) == len(list(chunk.parameters()))
            head = "output_layer" if role == "critic" else "no such name"
            replicated = [n for name, n in sizes.items() if "layernorm" in name or head in name]
            counts.append((sum(sizes.values()), sum(replicated)))
    return counts


def config_dirs(tmp_path, trees=None):
    trees = trees or {name: {"model_type": "qwen2", **config_json(name)} for name in SHAPES}
    for name, tree in trees.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(tree))
    return [str(tmp_path / name) for name in trees]


def test_the_family_builds_with_transformers_counts(tmp_path, workers):
    """The vocabularies are multiples of 128: one rank holds exactly HF's parameters."""
    hf_paths = config_dirs(tmp_path)
    (counts,) = workers.run(1, count_on_meta, hf_paths, Layout())
    for i, name in enumerate(SHAPES):
        shape = read_model_shape(hf_paths[i])
        assert counts[2 * i][0] == COUNTS[name]
        assert counts[2 * i + 1][0] == parameter_count(shape, value_head=True)


def test_the_family_builds_on_two_ranks(tmp_path, workers):
    """TP 2 pads to multiples of 256: 151,936 = 593.5 * 256 and 152,064 = 594 * 256."""
    hf_paths = config_dirs(tmp_path)
    results = workers.run(2, count_on_meta, hf_paths, Layout(tp=2))
    for i, name in enumerate(SHAPES):
        shape = read_model_shape(hf_paths[i])
        padding = 128 * shape.hidden_size if shape.vocab_size == 151936 else 0
        for role, expected in enumerate((COUNTS[name], parameter_count(shape, value_head=True))):
            ours = [result[2 * i + role] for result in results]
            assert ours[0] == ours[1]
            total, replicated = ours[0]
            matrices = (1 if role else 2 - shape.tied) * padding
            assert 2 * total - replicated == expected + matrices


def test_other_families_build_with_transformers_counts(tmp_path, workers):
    """Both vocabularies are multiples of 128 too, and Llama's of 256."""
    hf_paths = config_dirs(tmp_path, published.MODELS)
    (counts,) = workers.run(1, count_on_meta, hf_paths, Layout(), ("actor",))
    assert [total for total, _ in counts] == [published.COUNTS[name] for name in published.MODELS]
    names = ["Qwen3-0.6B", "Llama-3.2-1B"]
    hf_paths = [str(tmp_path / name) for name in names]
    for found in workers.run(2, count_on_meta, hf_paths, Layout(tp=2), ("actor",)):
        # Qwen3-0.6B is tied and has 1024 columns; 28 layers hold norms of 2 * 1024 + 2 * 128.
        assert found[0][1] == 28 * (2 * 1024 + 2 * 128) + 1024
        padding = [128 * 1024, 0]
        for name, (total, replicated), extra in zip(names, found, padding):
            assert 2 * total - replicated == published.COUNTS[name] + extra


def describe(hf_path, layout, role):
    """Return for each chunk: layer numbers, names outside the layers, marks of shared weights."""
    model = build(hf_path, layout, role, value_head_init_std=0.5)
    found = []
    for chunk in model.chunks:
        names = [n for n, _ in chunk.named_parameters() if ".layers." not in n]
        shared = [n for n, p in chunk.named_parameters() if getattr(p, "shared_embedding", False)]
        weight = None
        if role == "actor" and chunk.post_process:
            weight = output_weight(chunk).detach().clone()
        elif role == "critic" and chunk.post_process:
            weight = chunk.output_layer.weight.detach().clone()
        first = None
        if chunk.pre_process:
            first = chunk.embedding.word_embeddings.weight.detach().clone()
        numbers = [layer.layer_number for layer in chunk.decoder.layers]
        found.append((numbers, names, shared, first, weight))
    return found


EMBEDDING = "embedding.word_embeddings.weight"
NORM = "decoder.final_layernorm.weight"
OUTPUT = "output_layer.weight"


def test_chunks_of_a_virtual_pipeline(tmp_path, workers):
    hf_path = write_hf(tmp_path)
    first, last = workers.run(2, describe, hf_path, Layout(pp=2, vpp=2), "actor")
    assert [chunk[:2] for chunk in first] == [([1], [EMBEDDING]), ([3], [])]
    assert [chunk[:2] for chunk in last] == [([2], []), ([4], [NORM, OUTPUT])]


def test_tied_weights_across_a_pipeline(tmp_path, workers):
    """Both copies stay parameters that megatron-core keeps equal, and start equal."""
    hf_path = write_hf(tmp_path, tied=True)
    (first,), (last,) = workers.run(2, describe, hf_path, Layout(pp=2), "actor")
    assert first[2] == [EMBEDDING] and last[2] == [OUTPUT]
    assert torch.equal(first[3], last[4]) and first[3].any()


def test_tied_weights_on_one_stage(tmp_path, workers):
    hf_path = write_hf(tmp_path, tied=True)
    (((_, names, _, embedding, output),),) = workers.run(1, describe, hf_path, Layout(), "actor")
    assert names == [EMBEDDING, NORM]
    assert torch.equal(embedding, output)


def test_a_critic_holds_no_output_matrix(tmp_path, workers):
    """Even when it starts from a tied model; its head is the same on every rank."""
    hf_path = write_hf(tmp_path, tied=True)
    results = workers.run(2, describe, hf_path, Layout(tp=2), "critic")
    for ((_, names, shared, _, head),) in results:
        assert names == [EMBEDDING, NORM, OUTPUT]
        assert shared == [] and head.shape == (1, 64) and head.dtype is torch.float32
    assert torch.equal(results[0][0][4], results[1][0][4])
    assert 0.3 < results[0][0][4].std() < 0.7


def test_a_critic_is_untied_across_a_pipeline(tmp_path, workers):
    """Otherwise megatron-core would sum the embedding's and the value head's gradients."""
    hf_path = write_hf(tmp_path, tied=True)
    (first,), (last,) = workers.run(2, describe, hf_path, Layout(pp=2), "critic")
    assert first[1:3] == ([EMBEDDING], []) and last[1:3] == ([NORM, OUTPUT], [])


def gradients(hf_path, recompute):
    """Return the gradients, and how often each kind of module ran forward in the whole pass."""
    torch.manual_seed(0)
    model = build(hf_path, Layout(recompute=recompute))
    (chunk,) = model.chunks
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    counts = Counter()
    for module in chunk.modules():
        name = type(module).__name__
        module.register_forward_pre_hook(lambda *_, name=name: counts.update([name]))
    ids = [torch.arange(9) + 5, torch.arange(30)]
    hidden = gather_hidden(call(chunk, ids), sequence_parallel=False)
    (hidden @ output_weight(chunk).t()).logsumexp(-1).sum().backward()
    return {n: p.grad for n, p in chunk.named_parameters()}, counts


def test_recompute_changes_no_gradient(tmp_path, workers):
    """Of 4 layers, selective runs the attention again in backward, and full the whole layer.

    Three layers in a block are three that run again; units of two layers are still all of them.
    """
    hf_path = write_hf(tmp_path)
    ((plain, counts),) = workers.run(1, gradients, hf_path, "none")
    assert (counts["PackedAttention"], counts["MLP"]) == (4, 4)
    for recompute, expected in (
        ("selective", (8, 4)), ("full", (8, 8)), ("block 3", (7, 7)), ("uniform 2", (8, 8)),
    ):  # fmt: skip
        ((again, counts),) = workers.run(1, gradients, hf_path, recompute)
        assert (counts["PackedAttention"], counts["MLP"]) == expected, recompute
        for name, gradient in plain.items():
            assert gradient.any() and torch.equal(gradient, again[name]), name


def test_settings(tmp_path):
    shape = read_model_shape(write_hf(tmp_path, {"rms_norm_eps": 1e-5}))
    config = make_config(Layout(), 1)
    settings = transformer_config(shape, config.model, config.parallel)
    assert settings.hidden_dropout == settings.attention_dropout == 0
    assert settings.layernorm_epsilon == 1e-5 and settings.normalization == "RMSNorm"
    assert settings.calculate_per_token_loss and settings.variable_seq_lengths
    assert settings.moe_token_dispatcher_type == "alltoall"
    assert not settings.deallocate_pipeline_outputs and not settings.gradient_accumulation_fusion
    assert (settings.overlap_p2p_comm, settings.batch_p2p_comm) == (False, True)
    assert settings.params_dtype is settings.pipeline_dtype is torch.float32
    assert not settings.bf16 and settings.recompute_granularity is None


def test_settings_of_a_virtual_pipeline_in_bfloat16(tmp_path):
    shape = read_model_shape(write_hf(tmp_path))
    config = make_config(Layout(pp=2, vpp=2, recompute="full"), 2, dtype="bfloat16")
    settings = transformer_config(shape, config.model, config.parallel)
    assert (settings.overlap_p2p_comm, settings.batch_p2p_comm) == (True, False)
    assert settings.virtual_pipeline_model_parallel_size == 2
    assert settings.bf16 and settings.params_dtype is settings.pipeline_dtype is torch.bfloat16
    assert settings.recompute_granularity == "full" and settings.recompute_num_layers == 1


def test_a_virtual_pipeline_of_one_chunk_is_none(tmp_path):
    shape = read_model_shape(write_hf(tmp_path))
    config = make_config(Layout(pp=2, vpp=1), 2)
    settings = transformer_config(shape, config.model, config.parallel)
    assert settings.virtual_pipeline_model_parallel_size is None
    assert not settings.overlap_p2p_comm


@pytest.mark.parametrize(
    ("vpp", "batched", "expected"),
    [
        (None, None, (False, True)),
        (None, False, (False, False)),
        (2, None, (True, False)),
        (2, False, (True, False)),
    ],
)
def test_sends_between_stages(tmp_path, vpp, batched, expected):
    """(overlap_p2p_comm, batch_p2p_comm); a pipeline without virtual stages cannot overlap."""
    shape = read_model_shape(write_hf(tmp_path))
    config = make_config(Layout(pp=2, vpp=vpp), 2)
    parallel = config.parallel.model_copy(update={"batch_p2p_comm": batched})
    settings = transformer_config(shape, config.model, parallel)
    assert (settings.overlap_p2p_comm, settings.batch_p2p_comm) == expected


def test_transformer_engine_must_be_there(tmp_path):
    shape = read_model_shape(write_hf(tmp_path))
    config = make_config(Layout(), 1, layer_spec="transformer_engine")
    with pytest.raises(ConfigError, match="model.layer_spec=transformer_engine, but it is not"):
        transformer_config(shape, config.model, config.parallel)
