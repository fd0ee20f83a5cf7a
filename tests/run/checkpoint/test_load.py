"""Resume: the losses of a run without the stop, two updates later too, on any layout.

Each checkpoint is written after the updates that follow it: what is loaded is what was copied.

The loss two updates after loading is the one that sees a wrong Adam state: a step count shared
between parameters, or moments that were not loaded, change nothing before. Does not exercise the
whole trainer (tests/e2e does) nor the GPU's optimizer.
"""

import threading

import pytest
import torch

from tests.cut import batch_of
from tests.weights.tiny_hf import write_tiny_hf

SAVED_AT, UPDATES = 2, 5
# Type of the parameters; whether the optimizer is distributed; what updates matrices.
SETTINGS = [
    pytest.param(("float32", True, "adamw"), marks=pytest.mark.slow),
    ("bfloat16", True, "adamw"),
    pytest.param(("float32", False, "adamw"), marks=pytest.mark.slow),
    pytest.param(("bfloat16", False, "adamw"), marks=pytest.mark.slow),
    pytest.param(("float32", True, "muon"), marks=pytest.mark.slow),
    ("bfloat16", True, "dion"),
]


def train(hf, root, settings, tp, pp, load, saved_at=SAVED_AT, cp=1):
    """Losses of a critic's updates; saves after saved_at, or starts from what was saved there."""
    import torch.distributed as dist

    from vapo_megatron.config import VapoConfig
    from vapo_megatron.data.microbatch import make_microbatch
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.models.value_head import values_of
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.context import gather_tokens
    from vapo_megatron.parallel.minibatches import MiniBatch
    from vapo_megatron.roles.critic import Critic
    from vapo_megatron.run.checkpoint.files import check_optimizer, newest_complete
    from vapo_megatron.run.checkpoint.load import load_run
    from vapo_megatron.run.checkpoint.writer import CheckpointWriter

    dtype, distributed_optimizer, method = settings
    config = VapoConfig.model_validate(
        {
            # The vocabulary of 300 is padded to 320 with TP 1, 384 with TP 2, 512 with TP 4.
            "model": {"hf_path": str(hf), "dtype": dtype, "make_vocab_size_divisible_by": 64},
            "parallel": {
                "world_size": dist.get_world_size(),
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "context_parallel_size": cp,
                "use_distributed_optimizer": distributed_optimizer,
            },
            "optimizer": {"critic_method": method},
        }
    )
    place = groups.initialize(config.parallel)
    model = Critic(read_model_shape(hf), config, place, str(hf)).trained
    tokens = torch.randint(0, 200, (40,), generator=torch.Generator().manual_seed(1))
    batch = batch_of(tokens, [15, 25], [10, 20])
    count = torch.tensor(30.0 * place.dp_size)
    part = make_microbatch(batch, cp_size=place.cp_size, cp_rank=place.cp_rank)
    mini_batch = MiniBatch([part], {"tokens": count})

    def loss_function(output, microbatch):
        values = gather_tokens(values_of(output)[microbatch.predicting], microbatch, place)
        loss = (values - 1).square().sum() / count
        return loss, {"loss": loss.detach()}

    start = 0
    if load:
        check_optimizer(newest_complete(root) / "critic", "critic", config, field="")
        start, state = load_run(newest_complete(root), {"critic": model})
        assert (start, state) == (saved_at, {"position": 7})
    losses, over = [], threading.Event()
    with CheckpointWriter(root, config.checkpoint) as writer:
        writer._thread.submit(over.wait, 100)
        for update in range(start, UPDATES):
            if update == saved_at and not load:
                writer.save(saved_at, {"critic": model}, {"position": 7})
            metrics = model.update(mini_batch, loss_function, 1e-2)
            losses.append(float(metrics["loss"]))
            writer.poll()
        assert load or not (root / "latest").exists(), "it is written only now"
        over.set()
    return losses, model.num_updates


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_resumed_losses(workers, tmp_path, settings):
    hf = tmp_path / "hf"
    write_tiny_hf(hf, tied=False, seed=0)
    root = tmp_path / "checkpoints"
    straight, _ = workers.run(2, train, hf, root, settings, 2, 1, False)[0]
    # The updates move the loss by far more than the tolerance below.
    assert abs(straight[SAVED_AT] - straight[-1]) > 0.01
    resumed, num_updates = workers.run(2, train, hf, root, settings, 2, 1, True)[0]
    assert resumed == straight[SAVED_AT:], "the same layout resumes bit for bit"
    assert num_updates == UPDATES
    tolerance = 1e-6 if settings[0] == "float32" else 5e-2  # bf16: other layouts round elsewhere
    for world_size, tp, pp in ((1, 1, 1), (2, 1, 2), (2, 1, 1)):
        other, _ = workers.run(world_size, train, hf, root, settings, tp, pp, True)[0]
        assert other == pytest.approx(straight[SAVED_AT:], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("method", ["adamw", pytest.param("dion", marks=pytest.mark.slow)])
def test_resume_in_other_context_parallel_sizes(workers, tmp_path, method):
    """Context-parallel ranks share the optimizer's state; fewer or more of them take it up."""
    # World size, TP, PP and CP.
    others = [(1, 1, 1, 1), (4, 1, 1, 4), (4, 2, 1, 2), (2, 1, 1, 1)]
    goes_on_in_other_layouts(workers, tmp_path, method, (2, 1, 1, 2), others, 1e-6)


def goes_on_in_other_layouts(workers, tmp_path, method, layout, others, tolerance, **sizes):
    """Make all updates in one layout, and what follows its checkpoint in it and in the others."""
    hf, root = tmp_path / "hf", tmp_path / "checkpoints"
    write_tiny_hf(hf, tied=False, seed=0, **sizes)

    def losses(layout, load):
        size, tp, pp, cp = layout
        settings = ("float32", True, method), tp, pp, load, SAVED_AT, cp
        return workers.run(size, train, hf, root, *settings)[0]

    straight, _ = losses(layout, False)
    assert abs(straight[SAVED_AT] - straight[-1]) > 0.01
    for other in (layout, *others):
        found, num_updates = losses(other, True)
        assert num_updates == UPDATES
        if other == layout:
            assert found == straight[SAVED_AT:], "the same layout resumes bit for bit"
        expected = pytest.approx(straight[SAVED_AT:], rel=tolerance, abs=tolerance)
        assert found == expected, other


def test_fewer_key_value_heads_than_ranks(workers, tmp_path):
    """Four ranks share the rows of two key-value heads; one rank takes them all up."""
    hf, root, settings = tmp_path / "hf", tmp_path / "checkpoints", ("float32", False, "adamw")
    write_tiny_hf(hf, kv_heads=2, seed=0)
    straight, _ = workers.run(4, train, hf, root, settings, 4, 1, False)[0]
    resumed, _ = workers.run(1, train, hf, root, settings, 1, 1, True)[0]
    assert resumed == pytest.approx(straight[SAVED_AT:], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("method", ["dion", pytest.param("muon", marks=pytest.mark.slow)])
def test_owners_and_slices_of_matrices_may_change(workers, tmp_path, method):
    """Four ranks share two key-value heads; then owners are other ranks, or slices other rows."""
    others = [(1, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 1)]
    layout = (4, 4, 1, 1)
    goes_on_in_other_layouts(workers, tmp_path, method, layout, others, 1e-5, kv_heads=2)


def refused(hf, root, wanted):
    """What is said where a checkpoint of one method is loaded for another."""
    from vapo_megatron.errors import CheckpointError

    with pytest.raises(CheckpointError) as error:
        train(hf, root, wanted, 1, 1, True)
    return str(error.value)


def test_another_methods_state_is_refused_by_name(workers, tmp_path):
    hf = tmp_path / "hf"
    write_tiny_hf(hf, tied=False, seed=0)
    for saved, others in {"adamw": ("dion",), "dion": ("adamw", "muon")}.items():
        root = tmp_path / saved
        workers.run(1, train, hf, root, ("float32", True, saved), 1, 1, False)
        for wanted in others:
            (said,) = workers.run(1, refused, hf, root, ("float32", True, wanted))
            assert f"optimizer is that of {saved}" in said
            assert f"optimizer.critic_method={wanted}; set it to {saved}" in said


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_resume_before_the_first_update(workers, tmp_path, settings):
    """The actor's optimizer is in this state throughout value pretraining."""
    hf = tmp_path / "hf"
    write_tiny_hf(hf, tied=False, seed=0)
    root = tmp_path / "checkpoints"
    straight, _ = workers.run(2, train, hf, root, settings, 2, 1, False, 0)[0]
    resumed, _ = workers.run(2, train, hf, root, settings, 2, 1, True, 0)[0]
    assert resumed == straight
