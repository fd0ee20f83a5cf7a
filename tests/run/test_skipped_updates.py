"""Updates that are skipped: on every rank alike, whichever of them finds what is not finite.

Real models in real processes; the faults are put in by hand. What a run keeps of them is in
tests/test_odd_batches.py. Not exercised: a GPU, on which other kernels compute the norm.
"""

import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.cut import mini_batches, select
from tests.dumped import MODEL
from tests.parallel.training import Layout, make_batch, make_config
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.gradient_buffers import wait_for_parameters
from vapo_megatron.parallel.optimizer_state import inner_optimizers
from vapo_megatron.roles import trained as trained_model
from vapo_megatron.roles.actor import Actor
from vapo_megatron.roles.critic import Critic
from vapo_megatron.roles.trained import UpdatesSkipped

CASES = {
    "actor TP2": ("actor", Layout(tp=2), "float32"),
    "actor DP2": ("actor", Layout(dp=2), "float32"),
    "critic PP2": ("critic", Layout(pp=2), "float32"),
    "critic DP2 distributed": ("critic", Layout(dp=2, distributed=True, overlap=True), "bfloat16"),
}
FAULTS = ("rollout_logprobs", "values", "loss", "gradient")
LIMIT = 6


def build(hf, role, layout, dtype):
    torch.manual_seed(0)
    config = make_config(
        layout,
        model={"dtype": dtype, "hf_path": hf},
        optimizer={"max_skipped_updates": LIMIT, "critic_warmup_updates": 4},
    )
    kind = Actor if role == "actor" else Critic
    return kind(read_model_shape(hf), config, groups.current(), str(hf))


def mini_batch_of(model, logprobs=None, **faulty):
    """A mini-batch; faulty numbers stand on the last data-parallel rank alone."""
    place, data = model.ranks, make_batch(60)
    share = [[0, 1, 3], [2, 5, 6]][place.dp_rank] if place.dp_size == 2 else [0, 1, 2, 3, 5, 6]
    data = select(data, share)
    data = data.replace(values=torch.zeros_like(data.returns), old_logprobs=logprobs)
    if place.dp_rank == place.dp_size - 1:
        for name, number in faulty.items():
            numbers = getattr(data, name).clone()
            numbers[-1] = number
            data = data.replace(**{name: numbers})
    plan = [[[0, 1], list(range(2, len(share)))]]
    (found,) = mini_batches(data, plan, place)
    return found


def bits(trained):
    """Everything that an update changes on this rank."""
    wait_for_parameters(trained.placed.chunks)
    found = [p.detach().clone() for chunk in trained.placed.model for p in chunk.parameters()]
    for inner in inner_optimizers(trained.placed.optimizer):
        for group in inner.param_groups:
            for main in group["params"]:
                found.append(main.detach().clone())
                found += [torch.as_tensor(v).clone() for v in inner.state[main].values()]
    return [*found, torch.tensor(trained.num_updates)]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def on_last_rank(model, fault):
    """Let the last rank alone compute a loss, or a gradient, that is not finite."""
    last = dist.get_rank() == dist.get_world_size() - 1
    if fault == "loss":
        honest = model._loss

        def loss(*args):
            found, metrics = honest(*args)
            return found, {**metrics, "loss": metrics["loss"] * (math.inf if last else 1)}

        return patch.object(model, "_loss", loss)
    honest = trained_model.forward_backward

    def forward_backward(*args):
        metrics = honest(*args)
        if last:
            # Of a tensor that every tensor-parallel rank holds in full.
            vector = [p for p in model.placed.model[-1].parameters() if p.dim() == 1][-1]
            vector.main_grad[0] = math.nan
        return metrics

    return patch.object(trained_model, "forward_backward", forward_backward)


def update(model, fault, good, bad):
    """One update with a fault."""
    if fault in bad:
        return model.update([bad[fault]])
    with on_last_rank(model, fault):
        return model.update([good])


def judge(hf, role, layout, dtype):
    """Judged here, on every rank."""
    groups.destroy()
    groups.initialize(make_config(layout).parallel)
    straight, model = (build(hf, role, layout, dtype) for _ in range(2))
    for each in (straight, model):
        logprobs = None
        if role == "actor":
            logprobs, _ = each.compute_logprobs(mini_batch_of(each).microbatches)
        good = mini_batch_of(each, logprobs)
        metrics = each.update([good])
        assert metrics[f"{role}/skipped_updates"] == 0
        if role == "actor":
            logprobs, _ = each.compute_logprobs(good.microbatches)
            good = mini_batch_of(each, logprobs)
    bad = {
        "rollout_logprobs": mini_batch_of(model, logprobs, rollout_logprobs=-math.inf),
        "values": mini_batch_of(model, logprobs, values=math.nan),
    }
    before = bits(model.trained)
    for count, fault in enumerate(FAULTS, 1):
        metrics = update(model, fault, good, bad)
        assert same(bits(model.trained), before), fault
        assert model.trained.skipped_in_a_row == count == model.trained.num_tried - 1
        assert metrics[f"{role}/skipped_updates"] == 1, fault
        assert not math.isfinite(metrics[f"{role}/grad_norm"])

    # The next update is made as if there had been nothing else.
    expected = straight.update([good])
    found = model.update([bad["values"], good])
    assert same(bits(model.trained), bits(straight.trained))
    assert not same(bits(model.trained), before)
    assert found == expected | {f"{role}/skipped_updates": 1.0}
    assert model.trained.skipped_in_a_row == 0

    before = bits(model.trained)
    with pytest.raises(UpdatesSkipped, match=f"{LIMIT} updates of the {role} in a row"):
        model.update([bad["rollout_logprobs"]] * 9)
    assert same(bits(model.trained), before)


@pytest.mark.parametrize("role,layout,dtype", CASES.values(), ids=CASES)
def test_what_one_rank_finds_is_skipped_by_all(workers, tmp_path, role, layout, dtype):
    hf = str(write_tiny_hf(tmp_path / "hf", **MODEL))
    workers.run(2, judge, hf, role, layout, dtype)
