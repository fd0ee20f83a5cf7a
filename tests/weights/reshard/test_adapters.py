"""Policies with adapters reach vLLM both ways, merged and apart, as peft has them.

Real engines in two gloo processes, as in test_sync.py; three adapters one after the other, each
with the same prompts, so that a cached prefix or an adapter that stays would show.
"""

import pytest
import torch
from safetensors.torch import load_file

from tests.weights.peft_directory import ALL, load_with_peft, logprobs_of, write_adapters
from tests.weights.reshard import adapter_jobs as jobs
from tests.weights.tiny_hf import write_tiny_model

SLOW = pytest.mark.slow
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
RUNS = [
    pytest.param((1, TP, "adapter", ALL), id="tp2 into 2 x tp1, apart"),
    pytest.param((2, TP, "merged", ALL), id="tp2 into tp2, merged"),
    pytest.param((2, PP, "adapter", ("q_proj", "up_proj")), id="pp2 into tp2, apart", marks=SLOW),
    pytest.param((1, PP, "merged", ("q_proj", "up_proj")), id="pp2 into 2 x tp1", marks=SLOW),
    pytest.param((2, {}, "adapter", ALL), id="dp2 into tp2, apart", marks=SLOW),
]


@pytest.mark.parametrize("run", RUNS)
def test_responses_are_those_of_peft(vllm_workers, tmp_path, run):
    rollout_tp, layout, how, targets = run
    base = write_tiny_model(tmp_path / "model", hidden=128, heads=4, kv_heads=2)
    adapters = [
        write_adapters(base, tmp_path / f"adapter{seed}", targets, seed=seed) for seed in range(3)
    ]
    arguments = (tmp_path, str(base), adapters, rollout_tp, layout, how)
    results = vllm_workers.run(2, jobs.published, *arguments, timeout_seconds=280)
    models = [load_with_peft(base, directory) for directory in adapters]
    for found in results:
        for number, sampled in enumerate(found["sampled"]):
            assert sampled
            for prompt, tokens, logprobs in sampled:
                errors = [
                    (logprobs_of(model, prompt, tokens) - torch.tensor(logprobs)).abs().max()
                    for model in models
                ]
                assert errors[number] < 1e-5
                # Another adapter is far away.
                assert min(e for i, e in enumerate(errors) if i != number) > 0.05
        assert how == "merged" or found["read"] == found["sampled"][-1]
        assert found["ends"].startswith("RuntimeError: the engine's weights differ")
    check_bytes(adapters[0], results[0]["received"], layout, how)
    check_exports(base, tmp_path, models[-1])


def check_bytes(directory, received, layout, how):
    """What crosses between ranks: of the adapters, what a rank is missing of their matrices."""
    if how == "merged":
        assert len(set(received)) == 1
        return
    adapter = load_file(f"{directory}/adapter_model.safetensors")
    whole = sum(tensor.nbytes for tensor in adapter.values())
    cut = sum(t.nbytes for name, t in adapter.items() if is_cut(name))
    first, second, after_sleep = received
    if layout == {}:
        # Each rank has all of it.
        assert received == [0, 0, 0]
        return
    assert first == after_sleep > 2 * second
    if layout == TP:
        # Each of two ranks lacks half of what is cut.
        assert second == cut
    else:
        # Each has the layers of its own stage.
        assert second == whole


def is_cut(name):
    by_columns = "o_proj" in name or "down_proj" in name
    return ("lora_A" in name) == by_columns


def check_exports(base, directory, model):
    """transformers reads the merged model, peft the adapter, with the logits of the last one."""
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(directory / "merged", dtype=torch.float32)
    again = load_with_peft(base, directory / "exported")
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        expected = model(ids).logits
        assert (merged(ids).logits - expected).abs().max() < 1e-5
        assert torch.equal(again(ids).logits, expected)
