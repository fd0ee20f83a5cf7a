"""The check on a step's first ratios: rounding passes, the mistakes that it is for do not.

One bfloat16 and one float32 model, two tensor-parallel ranks and one. Between the pass of
old_logprobs and the update something changes, as it would by a mistake. Nondeterministic reductions
themselves need a GPU; a change of hidden elements by one unit in the last place stands for them.
"""

import pytest
import torch

from tests.cut import mini_batches
from tests.roles.test_roles import batch
from tests.weights.tiny_hf import write_tiny_hf


def outcome(hf, dtype, tp_size, change):
    """The metrics of an update after `change`, or the error."""
    import vapo_megatron.roles.actor as roles
    from vapo_megatron.algorithm.agreement import LogprobsDiffer
    from vapo_megatron.config import VapoConfig
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.minibatches import make_microbatches

    config = VapoConfig.model_validate(
        {
            "model": {"hf_path": str(hf), "dtype": dtype},
            "parallel": {"world_size": tp_size, "tensor_model_parallel_size": tp_size},
        }
    )
    place = groups.initialize(config.parallel)
    actor = roles.Actor(read_model_shape(hf), config, place, str(hf))
    plan = [[0, 1], [2, 3]]
    logprobs, _ = actor.compute_logprobs(make_microbatches(batch(), map(len, plan), multiple_of=1))
    trained = batch(logprobs)
    gather = roles.gather_hidden
    if change == "ulp":
        roles.gather_hidden = lambda *args, **kwargs: one_ulp(gather(*args, **kwargs))
    elif change == "weights":
        with torch.no_grad():
            for parameter in actor.placed.model[0].parameters():
                parameter.mul_(1.05)
    elif change == "tokens":
        trained = trained.replace(tokens=trained.tokens.roll(1))
    elif change == "responses":
        trained = trained.replace(old_logprobs=logprobs.roll(1))
    elif change == "temperature":
        actor.config = config.model_copy(
            update={"rollout": config.rollout.model_copy(update={"temperature": 0.9})}
        )
    try:
        return actor.update(mini_batches(trained, [plan], place))
    except LogprobsDiffer as error:
        return str(error)
    finally:
        roles.gather_hidden = gather


def one_ulp(hidden):
    """Change one element in a hundred, in float32 all, by one unit in the last place."""
    generator = torch.Generator().manual_seed(hidden.numel())
    chosen = torch.rand(hidden.shape, generator=generator) < (
        0.01 if hidden.dtype == torch.bfloat16 else 1
    )
    return torch.where(chosen, torch.nextafter(hidden, hidden.new_tensor(torch.inf)), hidden)


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """Logits of up to about 20, where one unit in bfloat16's last place is .125."""
    from safetensors.torch import load_file, save_file

    directory = write_tiny_hf(
        tmp_path_factory.mktemp("ratio"), num_layers=2, hidden=256, heads=4, kv_heads=2, ffn=64,
        vocab=60,
    )  # fmt: skip
    weights = load_file(directory / "model.safetensors")
    head = weights["lm_head.weight"].float()
    # A normalised hidden state has elements of about 1, so logits have a standard deviation of 7.
    weights["lm_head.weight"] = (head / head.norm(dim=1, keepdim=True) * 7).to(head.dtype)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_ulp_goes_on(workers, hf, dtype, tp_size):
    for metrics in workers.run(tp_size, outcome, hf, dtype, tp_size, "ulp"):
        assert not isinstance(metrics, str), metrics
        assert metrics["actor/first_ratio_diff_max"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mistakes_stop_the_run(workers, hf, dtype):
    for mistake in ("weights", "tokens", "responses", "temperature"):
        (found,) = workers.run(1, outcome, hf, dtype, 1, mistake)
        assert "differs from 1 by" in found, (mistake, found)
