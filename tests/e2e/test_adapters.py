"""Whole runs with adapters (LoRA): actor, critic and reference policy over one base, and vLLM.

What the steps compute is held elsewhere (test_adapters.py of tests/distributed and of
tests/weights/reshard, tests/roles/test_base.py); here it goes through the command that users start.
Minutes:

    bash tests/run.sh tests/e2e/test_adapters.py -m slow
"""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.command_run import command, evaluate, lasting, make_inputs, train
from tests.e2e.started import kill_once
from tests.e2e.test_run import run
from tests.weights.peft_directory import load_with_peft, write_adapters
from tests.whole_run import saved

ADAPTERS = ["algorithm.kl_coef=0.05", "model.lora.rank=4"]
MERGED = [*ADAPTERS, "parallel.offload=true", "rollout.tensor_model_parallel_size=2"]
APART = [*ADAPTERS, "parallel.offload=false", "rollout.adapter_sync=adapter"]
OTHERS = [
    *ADAPTERS, "rollout.placement=disaggregated", "rollout.num_processes=1", "rollout.lag=1",
    "rollout.adapter_sync=adapter", "rollout.max_logprob_difference=null",
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("adapters"), "qwen3")


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """(Run directory, its rows): offloaded, adapters merged into the weights that vLLM gets."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    return run_dir, train(inputs, run_dir, 3, *MERGED)


@pytest.mark.slow
def test_sampler_trainer_and_update_agree(whole):
    for step in (2, 3, 4):
        row = whole[1][step]
        assert 0 < row["rollout/logprob_diff_max"] < 1e-4, "sampler and trainer"
        assert row["actor/first_ratio_diff_max"] < 1e-6, "the update and the pass before it"
    # The reference policy has no adapters, and the policy leaves it.
    distances = [whole[1][step]["actor/reference_kl"] for step in (2, 3, 4)]
    assert 1e-3 < distances[0] < distances[1] < distances[2]


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_and_exports_for_transformers_and_peft(whole, inputs, tmp_path):
    from transformers import AutoModelForCausalLM

    train(inputs, tmp_path / "again", 1, *MERGED)
    again = train(inputs, tmp_path / "again", 3, *MERGED)
    for step in (3, 4):
        assert lasting(again[step]) == lasting(whole[1][step])
    assert_same_adapters(whole[0] / "adapter_export", tmp_path / "again/adapter_export")
    merged = AutoModelForCausalLM.from_pretrained(whole[0] / "hf_export", dtype=torch.float32)
    adapted = load_with_peft(inputs / "hf", whole[0] / "adapter_export")
    base = AutoModelForCausalLM.from_pretrained(inputs / "hf", dtype=torch.float32)
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        logits = [model(ids).logits for model in (merged, adapted, base)]
    assert (logits[0] - logits[1]).abs().max() < 1e-5 < (logits[0] - logits[2]).abs().max()


def assert_same_adapters(*directories):
    first, second = (load_file(path / "adapter_model.safetensors") for path in directories)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.slow
def test_both_ways_of_the_sync_train_alike(whole, inputs, tmp_path):
    apart = train(inputs, tmp_path / "apart", 3, *APART)
    adapters = sum(t.nbytes for t in load_file(
        whole[0] / "adapter_export/adapter_model.safetensors").values())  # fmt: skip
    for step in (2, 3, 4):
        assert apart[step]["rollout/logprob_diff_max"] < 1e-4
        # Each of two ranks lacks half of what is cut.
        assert apart[step]["sync/received_bytes"] < adapters
        weights = (inputs / "hf/model.safetensors").stat().st_size
        assert 0 < apart[step]["sync/received_bytes"] < weights / 10
        # The same responses but for a token whose two best scores rounding turns round.
        for name in ("actor/grad_norm", "critic/loss"):
            assert apart[step][name] == pytest.approx(whole[1][step][name], rel=0.2)


@pytest.mark.slow
def test_a_killed_run_with_lag_goes_on(inputs, tmp_path):
    straight = train(inputs, tmp_path / "straight", 4, *OTHERS)
    words = command(inputs, tmp_path / "killed", 4, *OTHERS)
    kill_once((tmp_path / "killed/checkpoints/latest").exists, words, tmp_path / "log")
    rows = train(inputs, tmp_path / "killed", 4, *OTHERS)
    assert rows.keys() == straight.keys()
    for step in rows:
        assert lasting(rows[step]) == lasting(straight[step]), step


@pytest.mark.slow
def test_the_export_is_evaluated_as_the_run_was(whole, inputs, tmp_path):
    rows = evaluate(inputs, whole[0], tmp_path / "responses.jsonl")
    assert len(rows) == 8 and all(len(row["responses"]) == 2 for row in rows)


@pytest.mark.slow
def test_a_checkpoint_converts_to_a_peft_directory(whole, inputs, tmp_path):
    from transformers import AutoModelForCausalLM

    from vapo_megatron.cli.sampling.directory import find_hf_directory

    checkpoint = whole[0] / "checkpoints/step_000004"
    words = [sys.executable, "-m", "vapo_megatron", "convert", "to-hf", "--hf", f"{inputs}/hf"]
    run([*words, "--megatron", f"{checkpoint}/actor", "--out", f"{tmp_path}/peft"])
    assert_same_adapters(whole[0] / "adapter_export", tmp_path / "peft")
    done = run([*words, "--megatron", f"{checkpoint}/critic", "--out", f"{tmp_path}/critic"], 2)
    assert "a critic's adapters" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "critic").exists()
    # As docs/lora.md merges it, it is a whole model: that of hf_export.
    page = Path(__file__).resolve().parents[2].joinpath("docs/lora.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", page, re.S) if "merge" in b)
    places = {"DIR": tmp_path / "peft", "MERGED": tmp_path / "merged", "BASE": inputs / "hf"}
    for word, place in places.items():
        block = block.replace(f'"{word}"', repr(str(place)))
    run([sys.executable, "-c", block])
    exported, merged = (
        AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32).state_dict()
        for d in (whole[0] / "hf_export", find_hf_directory(tmp_path / "merged"))
    )
    assert exported.keys() == merged.keys() and (tmp_path / "merged/tokenizer.json").is_file()
    assert max((merged[name] - t).abs().max() for name, t in exported.items()) < 1e-6


@pytest.mark.slow
def test_a_run_starts_from_a_peft_directory(inputs, tmp_path):
    adapter = write_adapters(inputs / "hf", tmp_path / "adapter")
    settings = ["model.lora.alpha=6", f"model.lora.path={adapter}"]
    # One update, whose gradient is of the first policy.
    settings += ["algorithm.mini_batch_size=32"]
    rows = train(inputs, tmp_path / "run", 1, *APART, *settings)
    # The reference policy has the same adapters.
    assert abs(rows[2]["actor/reference_kl"]) < 1e-6
    assert rows[2]["rollout/logprob_diff_max"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_run_starts_with_the_critic_of_a_value_stage(inputs, tmp_path, with_optimizer):
    stage = ["algorithm.stage=value_pretraining", "algorithm.value_pretraining_steps=2"]
    stage += ["algorithm.kl_coef=0", "algorithm.lambda_critic=1"]
    train(inputs, tmp_path / "stage", 1, *MERGED, *stage)
    values = saved(tmp_path / "stage", 2, "critic")
    assert any(t.any() for name, t in values.items() if name.endswith("_adapter.B"))
    train(
        inputs, tmp_path / "run", 1, *MERGED, f"model.critic_checkpoint={tmp_path}/stage",
        f"model.critic_checkpoint_optimizer={str(with_optimizer).lower()}",
        "algorithm.value_pretraining_steps=0", "optimizer.critic_learning_rate=1e-12",
    )  # fmt: skip
    again = saved(tmp_path / "run", 1, "critic")
    assert values.keys() == again.keys()
    for name, tensor in values.items():
        if not name.startswith("optimizer."):
            assert torch.allclose(again[name], tensor, atol=1e-8), name
    # Moments are kept, or begin anew.
    moments = [n for n in values if ".exp_avg." in n and values[n].any()]
    kept = [torch.nn.functional.cosine_similarity(values[n].flatten(), again[n].flatten(), dim=0)
            for n in moments]  # fmt: skip
    assert (min(kept) > 0.5) == with_optimizer


def refused(inputs, run_dir, *overrides):
    """What a run that must not start says, in one line."""
    done = run(command(inputs, run_dir, 1, "--dry-run", *ADAPTERS, *overrides), 2)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    return line


@pytest.mark.slow
def test_mistakes_are_told_in_one_line(whole, inputs, tmp_path):
    def told(*overrides, run="run"):
        return refused(inputs, tmp_path / run, *overrides)

    assert "model.lora.rank=0 must be greater than or equal to 1" in told("model.lora.rank=0")
    assert "model.lora.targets[0]='qkv' must be 'q_proj'" in told("model.lora.targets=[qkv]")
    full = ["model.lora.rank=null"]
    shutil.copytree(whole[0], tmp_path / "adapters")
    line = told(*full, run="adapters")
    assert "holds adapters of the actor, which model.lora.rank=null does not train" in line
    line = told("model.lora.rank=8", run="adapters")
    assert "holds adapters of rank 4, which model.lora.rank=8 must equal; set it to 4" in line
    train(inputs, tmp_path / "full", 1, *ADAPTERS, *full)
    line = told(run="full")
    assert "holds whole weights of the actor, which model.lora.rank=4 does not train" in line
    # Adapters of other weights of the same shape.
    other = other_weights(inputs / "hf", tmp_path / "other")
    settings = ["model.lora.alpha=32", f"model.lora.path={whole[0]}/adapter_export"]
    assert "lora_alpha" not in told("model.lora.targets=[q_proj]", *settings)
    line = told(*settings, f"model.hf_path={other}")
    assert f"has adapters of {inputs}/hf, whose weights are not those of model.hf_path" in line
    line = told("model.lora.rank=8", *settings)
    assert "its r is 4, which model.lora.rank=8 must equal; set rank=4" in line


def other_weights(hf, directory):
    """Copy a model, and change its weights a little."""
    shutil.copytree(hf, directory)
    weights = {n: t * 1.01 for n, t in load_file(directory / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.slow
def test_another_base_is_refused_by_a_resumed_run(whole, inputs, tmp_path):
    other = other_weights(inputs / "hf", tmp_path / "other")
    shutil.copytree(whole[0], tmp_path / "run")
    words = command(inputs, tmp_path / "run", 5, *MERGED, f"model.hf_path={other}")
    done = run(words, None, timeout=500)
    assert done.returncode != 0
    assert "has other weights than those that the adapters in" in done.stderr
    state = json.loads((tmp_path / "run/checkpoints/step_000004/state.json").read_text())
    assert state["step"] == 4
