"""A critic with its attention frozen: the rest learns as it did, and nothing else of it moves.

Its host memory is in tests/roles/test_device_schedule.py. Transformer Engine's layers run the same
in tests/gpu/test_transformer_engine.py.
"""

import pytest
import torch

from tests.cut import mini_batches, select
from tests.dumped import MODEL
from tests.parallel.training import Layout, make_batch, make_config
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.config import CheckpointConfig
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.minibatches import packed_multiple
from vapo_megatron.roles.critic import Critic
from vapo_megatron.run.checkpoint.files import newest_complete
from vapo_megatron.run.checkpoint.load import load_run
from vapo_megatron.run.checkpoint.writer import CheckpointWriter
from vapo_megatron.weights.gather import full_gradients

CASES = {
    "TP2 SP float32": (Layout(tp=2, sp=True), "float32"),
    "DP2 distributed bfloat16": (Layout(dp=2, distributed=True, overlap=True), "bfloat16"),
}
UPDATES = 3


def build(hf, layout, dtype, freeze):
    torch.manual_seed(0)
    config = make_config(
        layout,
        model={"dtype": dtype, "hf_path": hf},
        algorithm={"freeze_critic_attention": freeze},
        # The rates warm up over updates: a resumed critic must know how many there were.
        optimizer={"critic_learning_rate": 1e-2, "critic_warmup_updates": 4},
    )
    return Critic(read_model_shape(hf), config, groups.current(), str(hf))


def mini_batch_of(critic):
    data = make_batch(60)
    data = select(data, [[0, 1, 3], [2, 5, 6]][critic.ranks.dp_rank])
    (found,) = mini_batches(
        data,
        [[[0, 1], [2]]],
        critic.ranks,
        multiple_of=packed_multiple(critic.config.parallel, critic.config.model.fp8),
    )
    return found


def bits(critic):
    chunk = critic.placed.model[0]
    return {name: p.detach().clone() for name, p in chunk.named_parameters()}


def gradients(critic):
    critic.compute_gradients(mini_batch_of(critic))
    shape = read_model_shape(critic.config.model.hf_path)
    named = full_gradients(critic.placed.chunks, shape, critic.ranks, "critic")
    return {name: gradient.clone() for name, gradient in named}


def learn(hf, root, layout, dtype):
    """Judged here, on every rank."""
    groups.initialize(make_config(layout).parallel)
    whole, critic = (build(hf, layout, dtype, freeze) for freeze in (False, True))
    before, expected = bits(critic), gradients(whole)
    for name, found in gradients(critic).items():
        assert found.any() == ("self_attn" not in name), name
        if "self_attn" not in name:
            torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    metrics = [critic.update([mini_batch_of(critic)]) for _ in range(UPDATES)]
    assert metrics[-1]["critic/loss"] < metrics[0]["critic/loss"]
    for name, after in bits(critic).items():
        # Transformer Engine's layers keep their first norm with the projection behind it.
        is_frozen = ".self_attention." in name and not name.endswith("layer_norm_weight")
        assert torch.equal(after, before[name]) == is_frozen, name

    # By turns and through a checkpoint, the same bits.
    again = build(hf, layout, dtype, freeze=True)
    again.placed.offload()
    with again.placed.held("training"):
        again.update([mini_batch_of(again)])
    with CheckpointWriter(root, CheckpointConfig()) as writer:
        writer.save(1, {"critic": again.trained}, {})
    again.placed.close()
    again = build(hf, layout, dtype, freeze=True)
    again.placed.offload()
    assert load_run(newest_complete(root), {"critic": again.trained}) == (1, {})
    with again.placed.held("training"):
        resumed = [again.update([mini_batch_of(again)]) for _ in range(UPDATES - 1)]
        assert resumed == metrics[1:]
        for name, after in bits(again).items():
            assert torch.equal(after, bits(critic)[name]), name
    again.placed.close()


@pytest.mark.parametrize("layout,dtype", CASES.values(), ids=CASES)
def test_attention_stands_still_and_the_rest_learns(workers, tmp_path, layout, dtype):
    hf = str(write_tiny_hf(tmp_path / "hf", **MODEL))
    workers.run(2, learn, hf, tmp_path / "checkpoints", layout, dtype)
