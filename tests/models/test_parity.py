"""The actor's logits and gradients equal transformers', in float32, for every layout of one stage.

Does not exercise pipelines, whose losses and gradients tests/distributed compares with one process,
nor any reduced precision but that it runs.
"""

import pytest
import torch
import torch.distributed as dist

from tests.models.built import Layout, build, call, write_hf
from vapo_megatron.models.build import gather_hidden, output_weight
from vapo_megatron.weights.hf import load_hf_weights

VOCAB = 300
LENGTHS = (5, 40, 1, 9, 41)
LAYOUTS = {"tp1": Layout(), "tp2": Layout(tp=2), "tp2 sp": Layout(tp=2, sp=True)}

# Of the largest logit. Against float64, transformers' own float32 logits of these models err by
# 0.6e-6 to 1.0e-6 of it, and ours by 0.7e-6 to 1.3e-6.
RELATIVE = 2e-6


def token_ids():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (n,), generator=generator) for n in LENGTHS]


def logit_weights():
    """Weights of the loss whose gradient is compared: sum(weights * logits)."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(sum(LENGTHS), VOCAB, generator=generator)


def run(hf_path, layout, packed=True, with_gradients=False):
    """Return the logits [S, V] and gradients of the norms and of the embedding's first rows."""
    model = build(hf_path, layout)
    load_hf_weights(model.chunks, model.shape, hf_path, model.groups, "actor")
    (chunk,) = model.chunks
    ids = token_ids()
    with torch.set_grad_enabled(with_gradients):
        hidden = [
            gather_hidden(call(chunk, some), sequence_parallel=layout.sp)
            for some in ([ids] if packed else [[sequence] for sequence in ids])
        ]
        local = torch.cat(hidden) @ output_weight(chunk).t()
    rows = local.size(1)
    gradients = {}
    if with_gradients:
        first = model.groups.tp_rank * rows
        mine = logit_weights()[:, first : first + rows]
        (local[:, : mine.size(1)] * mine).sum().backward()
        for name, parameter in chunk.named_parameters():
            if "layernorm" in name:
                if layout.sp:
                    assert parameter.sequence_parallel
                    dist.all_reduce(parameter.grad, group=model.groups.tp_group)
                gradients[name] = parameter.grad
            elif name.endswith("linear_proj.weight"):
                gradients[name] = parameter.grad
    parts = [torch.empty_like(local) for _ in range(layout.tp)]
    dist.all_gather(parts, local.detach().contiguous(), group=model.groups.tp_group)
    return torch.cat(parts, -1)[:, :VOCAB], gradients


def expected(hf_path):
    """Return transformers' model and its logits, one sequence at a time."""
    from transformers import Qwen2ForCausalLM  # Not above: workers need no transformers.

    model = Qwen2ForCausalLM.from_pretrained(hf_path, dtype=torch.float32).eval()
    return model, torch.cat([model(sequence[None]).logits[0] for sequence in token_ids()])


def assert_close(ours, theirs, times=1.0):
    assert (ours - theirs).abs().max() <= times * RELATIVE * theirs.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_and_gradients(tied, layout, tmp_path, workers):
    hf_path = write_hf(tmp_path, tied=tied, vocab=VOCAB)
    model, theirs = expected(hf_path)
    results = workers.run(LAYOUTS[layout].world_size, run, hf_path, LAYOUTS[layout], True, True)
    for ours, _ in results:
        assert_close(ours, theirs.detach())
    (theirs * logit_weights()).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for _, ours in results:
        assert_close(ours["decoder.final_layernorm.weight"], grads["model.norm.weight"], 3)
        for i in range(4):
            for name, theirs_name in (
                ("input_layernorm", "input_layernorm"),
                ("pre_mlp_layernorm", "post_attention_layernorm"),
            ):
                gradient = grads[f"model.layers.{i}.{theirs_name}.weight"]
                assert_close(ours[f"decoder.layers.{i}.{name}.weight"], gradient, 3)
    for i in range(4):
        name = f"decoder.layers.{i}.self_attention.linear_proj.weight"
        whole = torch.cat([ours[name] for _, ours in results], 1)
        assert_close(whole, grads[f"model.layers.{i}.self_attn.o_proj.weight"], 3)


def test_packed_equals_one_by_one(tmp_path, workers):
    hf_path = write_hf(tmp_path, vocab=VOCAB)
    ((packed, _),) = workers.run(1, run, hf_path, Layout(), True)
    ((alone, _),) = workers.run(1, run, hf_path, Layout(), False)
    assert_close(packed, alone)


SETTINGS = {
    "rope base": {"rope_theta": 500.0},
    "rope base, newer key": {
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    },
    "norm epsilon": {"rms_norm_eps": 1e-2},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn rope": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn rope, newer key": {
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "head size": {},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_config_are_computed(name, tmp_path, workers):
    """Each changes the logits by far more than the error allowed, and transformers agrees."""
    head_dim = 32 if name == "head size" else None
    hf_path = write_hf(tmp_path / "changed", SETTINGS[name], vocab=VOCAB, head_dim=head_dim)
    _, theirs = expected(hf_path)
    ((ours, _),) = workers.run(1, run, hf_path, Layout())
    assert_close(ours, theirs)
    _, plain = expected(write_hf(tmp_path / "plain", vocab=VOCAB))
    assert (plain - theirs).abs().max() > 1e-2


def run_bfloat16(hf_path, role):
    model = build(hf_path, Layout(), role, dtype="bfloat16", value_head_init_std=0.1)
    load_hf_weights(model.chunks, model.shape, hf_path, model.groups, role)
    (chunk,) = model.chunks
    with torch.no_grad():
        output = call(chunk, token_ids())
        if role == "critic":
            return output
        return gather_hidden(output, sequence_parallel=False) @ output_weight(chunk).t()


def test_bfloat16(tmp_path, workers):
    """bfloat16 has 8 bits: 0.4 % per rounding, a few roundings a layer."""
    hf_path = write_hf(tmp_path, vocab=VOCAB)
    _, theirs = expected(hf_path)
    (ours,) = workers.run(1, run_bfloat16, hf_path, "actor")
    assert ours.dtype is torch.bfloat16
    error = (ours[:, :VOCAB].float() - theirs).abs()
    assert 1e-3 < error.max() < 0.1 * theirs.abs().max()
    (values,) = workers.run(1, run_bfloat16, hf_path, "critic")
    assert values.dtype is torch.float32
    assert values.unique().numel() == values.numel(), "values were rounded to bfloat16"
