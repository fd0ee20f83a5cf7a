"""Offload in real layouts: bitwise round trips, training with and without, the host's budget.

Storages are freed and reloaded on the CPU as on a GPU. Not exercised: pinned memory, copies on a
stream, expandable segments (only their settings), fused optimizers, and how much GPU memory is
freed.
"""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist

from tests.cut import select
from tests.parallel.training import ALL, Layout, critic_loss, make_batch, make_config
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.config import CheckpointConfig, VapoConfig
from vapo_megatron.data.microbatch import make_microbatch
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.models.value_head import values_of
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.gradient_buffers import wait_for_parameters
from vapo_megatron.parallel.memory import available_host_bytes
from vapo_megatron.parallel.minibatches import MiniBatch
from vapo_megatron.parallel.offload import (
    ORDER,
    check_host_memory,
    expandable_segments,
    find_storages,
)
from vapo_megatron.parallel.optimizer_state import inner_optimizers
from vapo_megatron.parallel.schedule import forward_only
from vapo_megatron.roles.critic import Critic
from vapo_megatron.run.checkpoint.files import newest_complete
from vapo_megatron.run.checkpoint.load import load_run
from vapo_megatron.run.checkpoint.writer import CheckpointWriter

BOTH = ((ALL[:4], ALL[4:]),)
HALVES = ((ALL[:2], ALL[2:4]), (ALL[4:5], ALL[5:]))
LAYOUTS = {
    "one process": Layout(split=BOTH),
    "one process, distributed": Layout(distributed=True, split=BOTH),
    "TP2": Layout(tp=2, split=BOTH),
    "TP2 SP, distributed": Layout(tp=2, sp=True, distributed=True, split=BOTH),
    "PP2 VPP2": Layout(pp=2, vpp=2, split=BOTH),
    "DP2": Layout(dp=2, split=HALVES),
    "DP2, distributed, overlapping": Layout(dp=2, distributed=True, overlap=True, split=HALVES),
}

# By default each layout once.
DEFAULT = {"one process": "float32", "PP2 VPP2": "float32", "TP2 SP, distributed": "float32"}
CASES = [
    pytest.param(
        name, dtype, marks=[] if DEFAULT.get(name, "bfloat16") == dtype else pytest.mark.slow
    )
    for name in LAYOUTS
    for dtype in ("float32", "bfloat16")
]
MATRICES = [
    ("DP2", "float32", "dion"),
    *(
        pytest.param(name, dtype, method, marks=pytest.mark.slow)
        for name in ("DP2", "TP2", "PP2 VPP2")
        for dtype, method in (("bfloat16", "dion"), ("bfloat16", "muon"))
    ),
]
EXPERTS = {
    "DP2 EP2": Layout(dp=2, ep=2, split=HALVES),
    "TP2 SP EP2, distributed": Layout(tp=2, sp=True, ep=2, distributed=True, split=BOTH),
}


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory):
    return str(write_tiny_hf(tmp_path_factory.mktemp("tiny"), hidden=32, ffn=48, vocab=60))


@pytest.fixture(scope="module")
def experts_path(tmp_path_factory):
    sizes = {"hidden": 32, "ffn": 48, "vocab": 60}
    return str(write_tiny_hf(tmp_path_factory.mktemp("mixture"), family="qwen3_moe", **sizes))


def _bits(model):
    """All tensors that training depends on, by name."""
    found = {}
    with model.placed.held("state"):
        wait_for_parameters(model.placed.chunks)
        for c, chunk in enumerate(model.placed.chunks):
            found |= {(c, name): p.detach().clone() for name, p in chunk.named_parameters()}
        for i, inner in enumerate(inner_optimizers(model.placed.optimizer)):
            mains = [p for group in inner.param_groups for p in group["params"]]
            for j, main in enumerate(mains):
                found[i, j, "main"] = main.detach().clone()
                state = inner.state[main].items()
                found |= {(i, j, name): torch.as_tensor(v).clone() for name, v in state}
    return found


def parameters_of(model):
    return [p for chunk in model.placed._chunks for p in chunk.parameters()]


def _learn(hf_path, layout, dtype, offload, method="adamw"):
    """Two steps of a critic, values and an update; returns all results, and the model."""
    torch.manual_seed(0)
    config = make_config(layout, model={"dtype": dtype}, optimizer={"critic_method": method})
    groups.destroy()
    place = groups.initialize(config.parallel)
    shape = read_model_shape(hf_path)
    model = Critic(shape, config, place, hf_path).trained
    batch = make_batch(shape.vocab_size)
    one = torch.ones(())
    mini_batch = MiniBatch(
        [
            make_microbatch(select(batch, part), multiple_of=layout.tp if layout.sp else 1)
            for part in layout.split[place.dp_rank]
        ],
        {"tokens": one},
    )

    def head(output, microbatch):
        return values_of(output)[microbatch.predicting]

    def loss(output, microbatch):
        found = critic_loss(head(output, microbatch), microbatch.batch)
        return found, {"loss": found.detach()}

    if offload:
        model.placed.offload()
    results = []
    for _ in range(2):
        with model.placed.held("parameters"):
            results += forward_only(model.placed.chunks, mini_batch.microbatches, head)
        with model.placed.held("training"):
            results += model.update(mini_batch, loss, 1e-2).values()
    results += _bits(model).values()
    return results, model


def _both(hf_path, layout, dtype, method="adamw"):
    """Compare results with and without offload; return bytes on the device in each phase."""
    plain, _ = _learn(hf_path, layout, dtype, False, method)
    turned, model = _learn(hf_path, layout, dtype, True, method)
    assert len(plain) == len(turned) > 20
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(plain, turned))
    assert all(p.numel() == 0 or p.any() for p in plain[-10:])

    sizes = {}
    for part in ORDER:
        with model.placed.held(part):
            storages = find_storages(parameters_of(model), model.placed._optimizer)
            sizes[part] = [sum(s.nbytes() for s in some) for some in storages]
            if part == "nothing":
                for chunk in model.placed._chunks:
                    for tensor in (t for p in chunk.parameters() for t in (p, p.main_grad)):
                        assert tensor.untyped_storage().nbytes() == 0
            if part == "training":
                assert not any(p.main_grad.any() for p in model.placed.chunks[0].parameters())
    model.placed.close()
    return sizes, model.placed._offload.num_bytes


@pytest.mark.parametrize("name,dtype", CASES)
def test_nothing_is_learned_otherwise_and_nothing_is_left_behind(hf_path, workers, name, dtype):
    _require_both(workers, hf_path, name, dtype, "adamw")


@pytest.mark.parametrize("name,dtype,method", MATRICES)
def test_nor_with_owners_of_matrices(hf_path, workers, name, dtype, method):
    _require_both(workers, hf_path, name, dtype, method)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_come_and_go_too(experts_path, workers, name):
    _require_both(workers, experts_path, name, "bfloat16", "adamw")


def _require_both(workers, hf_path, name, dtype, method):
    layout = {**LAYOUTS, **EXPERTS}[name]
    for sizes, num_bytes in workers.run(layout.world_size, _both, hf_path, layout, dtype, method):
        parameters, state, gradients = sizes["training"]
        assert min(parameters, state, gradients) > 0
        assert num_bytes == parameters + state
        assert sizes["nothing"] == [0, 0, 0]
        assert sizes["parameters"] == [parameters, 0, 0]
        assert sizes["state"] == [parameters, state, 0]


def _turns(hf_path):
    """Nested phases, and use outside of a phase."""
    _, model = _learn(hf_path, Layout(distributed=True, split=BOTH), "bfloat16", offload=True)
    before = _bits(model)
    errors = []
    with model.placed.held("state"), model.placed.held("parameters"):
        errors.append(_error_of(lambda: model.placed.optimizer))
        model.placed.model[0].embedding.word_embeddings.weight.data.add_(1.0)
    after = _bits(model)
    assert [k for k in before if not torch.equal(before[k], after[k])] == [
        (0, "module.embedding.word_embeddings.weight")
    ]
    errors.append(_error_of(lambda: model.placed.chunks))
    with model.placed.held("parameters"):
        errors.append(_error_of(lambda: model.placed.optimizer))
        errors.append(_error_of(lambda: model.update(None, None, 0.1)))
        # Only read: nothing is copied back.
        model.placed.model[0].embedding.word_embeddings.weight.data.add_(1.0)
    assert all(torch.equal(after[k], now) for k, now in _bits(model).items())
    with contextlib.suppress(KeyError), model.placed.held("training"):
        raise KeyError
    assert model.placed._offload.held == "training", "after an error nothing moves"
    return errors


def _error_of(function):
    try:
        function()
    except AssertionError as error:
        return str(error)
    return ""


def test_what_is_away_cannot_be_used(hf_path, workers):
    (errors,) = workers.run(1, _turns, hf_path)
    assert errors[0] == ""
    for found, held, used in zip(
        errors[1:], ("nothing", "parameters", "parameters"), ("parameters", "state", "state")
    ):
        assert f"needs {used!r} of the model on the device, found {held!r}" in found


def _replaced(hf_path):
    """An optimizer whose tensors are replaced, as torch's load_state_dict may do."""
    _, model = _learn(hf_path, Layout(split=BOTH), "bfloat16", offload=True)
    with model.placed.held("state"):
        (inner,) = inner_optimizers(model.placed.optimizer)
        for of_parameter in inner.state.values():
            of_parameter["exp_avg"] = of_parameter["exp_avg"] + 1
        given = _bits(model)
    left = find_storages(parameters_of(model), model.placed._optimizer)
    assert sum(s.nbytes() for part in left for s in part) == 0
    now = _bits(model)
    assert all(torch.equal(given[name], now[name]) for name in given)
    assert any(not torch.equal(t, torch.ones_like(t)) for n, t in now.items() if "exp_avg" in n)


def test_other_tensors_in_the_place_of_the_optimizers(hf_path, workers):
    workers.run(1, _replaced, hf_path)


def _checkpoint(hf_path, directory):
    """Saved and loaded while offloaded."""
    layout = Layout(split=BOTH)
    _, model = _learn(hf_path, layout, "float32", offload=True)
    before = _bits(model)
    with CheckpointWriter(directory, CheckpointConfig()) as writer:
        writer.save(1, {"critic": model}, {})
    model.placed.close()
    _, model = _learn(hf_path, layout, "float32", offload=True)
    with model.placed.held("state"):
        for p in model.placed.chunks[0].parameters():
            p.data.zero_()
    assert not all(torch.equal(before[k], now) for k, now in _bits(model).items())
    assert load_run(newest_complete(directory), {"critic": model}) == (1, {})
    assert model.placed._offload.held == "nothing"
    assert all(torch.equal(before[k], now) for k, now in _bits(model).items())


def test_a_checkpoint_of_what_is_away(hf_path, workers, tmp_path):
    workers.run(1, _checkpoint, hf_path, tmp_path)


def _budget(needed, allowed, local_size):
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size)
    parallel = VapoConfig.model_validate({"parallel": {"host_memory_gb": allowed}}).parallel
    try:
        check_host_memory(
            {"one thing": 1e9, "all": needed[dist.get_rank()] - 1e9}, parallel, ["a=b"]
        )
    except ConfigError as error:
        return str(error)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    return ""


@pytest.mark.parametrize(
    "needed,allowed,local_size,words",
    [
        ((2e9, 3e9), 5.0, 2, ""),
        (
            (2e9, 3e9),
            4.9,
            2,
            "needs 5 GB of host memory on the node of rank 0 (2 for one thing, 3 for all), but",
        ),
        ((2e9, 3e9), 4.9, 1, ""),
        ((2e9, 5e9), 4.9, 1, "node of rank 1 (1 for one thing, 4 for all), but 4.9 GB are"),
        (
            (2e9, 1e16),
            None,
            2,
            "GB are available; use more nodes, raise parallel.host_memory_gb, or set a=b",
        ),
    ],
)
def test_a_node_has_one_budget(workers, needed, allowed, local_size, words):
    found = workers.run(2, _budget, [int(n) for n in needed], allowed, local_size)
    assert found[0] == found[1]
    assert words in found[0] and bool(words) == bool(found[0]) and "\n" not in found[0]


def test_available_memory_is_the_least_of_the_kernels_and_the_groups(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "sys/fs/cgroup"
    proc.mkdir()
    groups.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable:     700 kB\n")
    assert available_host_bytes(tmp_path) == 700 * 1024
    (groups / "memory.max").write_text("max\n")
    assert available_host_bytes(tmp_path) == 700 * 1024
    (groups / "memory.max").write_text("500000\n")
    (groups / "memory.current").write_text("300000\n")
    (groups / "memory.stat").write_text("anon 250000\ninactive_file 40000\n")
    # 500,000 - 300,000 + 40,000 of cached files
    assert available_host_bytes(tmp_path) == 240_000


def test_the_allocators_other_options_stay(monkeypatch):
    set_to = ["max_split_size_mb:64"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: set_to[-1])
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", set_to.append)
    for _ in range(2):
        with expandable_segments():
            assert set_to[-1] == "max_split_size_mb:64,expandable_segments:True"
        assert set_to[-1] == "max_split_size_mb:64,expandable_segments:False"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    count = len(set_to)
    with expandable_segments():
        assert len(set_to) == count, "the user has decided"
