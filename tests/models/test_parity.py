"""Outputs and gradients of actor and critic equal transformers', in float32, on one stage.

Does not exercise pipelines, whose losses and gradients tests/distributed compares with one process,
nor any reduced precision but that it runs.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.models.built import Layout, build, call, write_hf
from tests.weights.tiny_hf import FAMILIES
from vapo_megatron.models.build import gather_hidden, output_weight
from vapo_megatron.models.value_head import values_of
from vapo_megatron.weights import layout as weight_layout
from vapo_megatron.weights.load_hf import load_hf_weights

VOCAB = 300
HEAD_DIM = 16
LENGTHS = (5, 40, 1, 9, 41)
TP4 = {"tp4": Layout(tp=4), "tp4 sp": Layout(tp=4, sp=True)}

# Of the largest logit. Against float64, transformers' own float32 logits of these models err by
# 0.6e-6 to 1.0e-6 of it, and ours by 0.7e-6 to 1.3e-6.
RELATIVE = 2e-6


def token_ids():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (n,), generator=generator) for n in LENGTHS]


def weights():
    """Of the loss whose gradient is compared: sum(weights * values)."""
    return torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(4))


def run(hf_path, role="actor", **settings):
    """Return one process's logits [S, padded V], or a critic's values."""
    model = build(hf_path, Layout(), role, **settings)
    load_hf_weights(model.chunks, model.shape, hf_path, model.ranks, role)
    (chunk,) = model.chunks
    with torch.no_grad():
        output = call(chunk, token_ids())
        if role == "critic":
            return output
        return gather_hidden(output, sequence_parallel=False) @ output_weight(chunk).t()


def run_critic(hf_path, layout):
    """Return the values [S] and some gradients of their weighted sum; see gradients_of."""
    model = build(hf_path, layout, "critic")
    load_hf_weights(model.chunks, model.shape, hf_path, model.ranks, "critic")
    (chunk,) = model.chunks
    values = values_of(call(chunk, token_ids()))
    (values * weights()).sum().backward()
    return values.detach(), gradients_of(model, layout)


def gradients_of(model, layout):
    """Return gradients of the norms, and this rank's of the attention's projections."""
    gradients = {}
    for name, parameter in model.chunks[0].named_parameters():
        if "layernorm" in name:
            if layout.sp:
                assert parameter.sequence_parallel
                dist.all_reduce(parameter.grad, group=model.ranks.tp_group)
            gradients[name] = parameter.grad
        elif "self_attention" in name:
            gradients[name] = parameter.grad
    return gradients


def expected(hf_path):
    """Return transformers' model and its logits, one sequence at a time."""
    from transformers import Qwen2ForCausalLM  # Not at the top: workers do not need transformers.

    model = Qwen2ForCausalLM.from_pretrained(hf_path, dtype=torch.float32).eval()
    return model, torch.cat([model(sequence[None]).logits[0] for sequence in token_ids()])


def assert_close(ours, theirs, times=1.0):
    assert (ours - theirs).abs().max() <= times * RELATIVE * theirs.abs().max()


def assert_gradients_close(ranks, model):
    """Compare what gradients_of returned on each rank with transformers' model after backward."""
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    for ours in ranks:
        assert_close(ours["decoder.final_layernorm.weight"], theirs["model.norm.weight"], 3)
    for i in range(model.config.num_hidden_layers):
        layer, their_layer = f"decoder.layers.{i}.", f"model.layers.{i}."
        for name, their_name in (
            ("input_layernorm", "input_layernorm"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
        ):
            for ours in ranks:
                gradient = theirs[f"{their_layer}{their_name}.weight"]
                assert_close(ours[f"{layer}{name}.weight"], gradient, 3)
        rows = [ours[layer + "self_attention.linear_proj.weight"] for ours in ranks]
        assert_close(torch.cat(rows, 1), theirs[their_layer + "self_attn.o_proj.weight"], 3)
        for kind in ("weight", "bias"):
            interleaved = torch.cat(
                [ours[f"{layer}self_attention.linear_qkv.{kind}"] for ours in ranks]
            )
            groups = model.config.num_key_value_heads
            parts = weight_layout.split_qkv(interleaved, num_groups=groups, head_dim=HEAD_DIM)
            for name, ours in zip("qkv", parts):
                assert_close(ours, theirs[f"{their_layer}self_attn.{name}_proj.{kind}"], 3)


@pytest.mark.parametrize("layout", TP4)
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_a_critic_of_fewer_key_value_heads_than_ranks(kv_heads, layout, tmp_path, workers):
    """4 query heads: with 2 key-value heads ranks 1 and 3 hold no query row; with 1, 1.5 heads."""
    hf_path = write_hf(tmp_path, vocab=VOCAB, kv_heads=kv_heads)
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(5)) / 8
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "score.weight": head}, file, metadata={"format": "pt"})
    results = workers.run(4, run_critic, hf_path, TP4[layout])
    save_file(tensors, file, metadata={"format": "pt"})
    model, _ = expected(hf_path)
    hidden = [model.model(sequence[None]).last_hidden_state[0] for sequence in token_ids()]
    theirs = torch.cat(hidden) @ head[0]
    for ours, _ in results:
        assert_close(ours, theirs.detach())
    (theirs * weights()).sum().backward()
    assert_gradients_close([gradients for _, gradients in results], model)


SETTINGS = {
    "rope base": {"rope_theta": 500.0},
    "rope base, newer key": {
        "rope_theta": None, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    },
    "norm epsilon": {"rms_norm_eps": 1e-2},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3 rope": {"rope_scaling": FAMILIES["llama"]["rope_scaling"]},
    "yarn rope": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
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
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_config_are_computed(name, tmp_path, workers):
    """Each changes the logits by far more than the error allowed, and transformers agrees."""
    head_dim = 32 if name == "head size" else None
    hf_path = write_hf(tmp_path / "changed", SETTINGS[name], vocab=VOCAB, head_dim=head_dim)
    _, theirs = expected(hf_path)
    (ours,) = workers.run(1, run, hf_path)
    assert_close(ours[:, :VOCAB], theirs)
    _, plain = expected(write_hf(tmp_path / "plain", vocab=VOCAB))
    assert (plain - theirs).abs().max() > 1e-2


def test_bfloat16(tmp_path, workers):
    """bfloat16 has 8 bits: 0.4 % per rounding, a few roundings a layer."""
    hf_path = write_hf(tmp_path, vocab=VOCAB)
    _, theirs = expected(hf_path)
    (ours,) = workers.run(1, partial(run, dtype="bfloat16"), hf_path)
    assert ours.dtype is torch.bfloat16
    error = (ours[:, :VOCAB].float() - theirs).abs()
    assert 1e-3 < error.max() < 0.1 * theirs.abs().max()
    narrow = {"dtype": "bfloat16", "value_head_init_std": 0.1}
    (values,) = workers.run(1, partial(run, role="critic", **narrow), hf_path)
    assert values.dtype is torch.float32
    assert values.unique().numel() == values.numel(), "values were rounded to bfloat16"
