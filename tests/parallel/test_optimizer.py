"""Learning rates as pure functions; AdamW, weight decay, clipping, main parameters on one process.

Optimizers sharded over ranks are in tests/distributed/test_matrix.py, resuming in the checkpoint's
tests. Not exercised: Transformer Engine's Adam.
"""

import math

import pytest
import torch

from tests.dumped import MODEL
from tests.parallel.training import LEARNING_RATE, Layout, Trained, make_config
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.config import VapoConfig
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.optimizer import (
    build_ddp,
    learning_rate,
    optimizer_step,
    set_learning_rate,
)


def _config(**optimizer):
    none = {"actor_warmup_updates": 0, "critic_warmup_updates": 0}
    return VapoConfig.model_validate({"optimizer": {**none, **optimizer}})


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_warmup_is_linear_and_then_constant(role):
    def rates(warmup_updates, count):
        other = {"actor": "critic", "critic": "actor"}[role]
        fields = {f"{role}_learning_rate": 8.0, f"{role}_warmup_updates": warmup_updates}
        optimizer = _config(**fields, **{f"{other}_learning_rate": 1.0}).optimizer
        return [learning_rate(u, optimizer, role) for u in range(count)]

    # 4 updates of warm-up: 1/4, 2/4, 3/4 of the peak, then the peak.
    assert rates(4, 6) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert rates(0, 1) == rates(1, 1) == [8.0]


def test_defaults_are_the_papers():
    # 320 updates of warm-up, then 1e-6 and 2e-6.
    optimizer = VapoConfig().optimizer
    assert learning_rate(159, optimizer, "actor") == pytest.approx(0.5e-6)
    assert learning_rate(159, optimizer, "critic") == pytest.approx(1e-6)
    assert learning_rate(5000, optimizer, "actor") == 1e-6
    assert learning_rate(5000, optimizer, "critic") == 2e-6


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("optimizer")
    return str(write_tiny_hf(path, **MODEL))


def _start(hf_path, role="actor", **sections):
    config = make_config(Layout(), **sections)
    if groups._current is None:
        groups.initialize(config.parallel)
    return Trained(hf_path, Layout(), role, config)


def _against_adamw(hf_path, role, clip_grad):
    """Largest difference to torch's AdamW in float64 after three updates, and the norms."""
    decay = 0.3
    clips = {"actor_clip_grad": 1e-3, "critic_clip_grad": 1e-3, f"{role}_clip_grad": clip_grad}
    trained = _start(hf_path, role, optimizer={**clips, "weight_decay": decay})
    parameters = list(trained.chunks[0].parameters())
    copies = [p.detach().double().clone().requires_grad_() for p in parameters]
    starts = [c.detach().clone() for c in copies]
    matrices = [c for c in copies if c.dim() > 1]
    vectors = [c for c in copies if c.dim() == 1]
    o = make_config(Layout()).optimizer
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(o.adam_beta1, o.adam_beta2),
        eps=o.adam_eps,
    )
    norms = []
    for update in range(3):
        rate = LEARNING_RATE * (update + 1)
        set_learning_rate(trained.optimizer, rate)
        trained.forward_backward()
        for p, c in zip(parameters, copies, strict=True):
            c.grad = p.main_grad.double().clone()
        norm = torch.cat([c.grad.flatten() for c in copies]).norm()
        if clip_grad:
            for c in copies:
                c.grad *= min(1.0, clip_grad / (norm + 1e-6))
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        norms.append((float(optimizer_step(trained.optimizer)), float(norm)))
    assert all(p.grad is None for p in parameters)
    error = max(float((p.double() - c).abs().max()) for p, c in zip(parameters, copies))
    moved = min(float((c - s).abs().max()) for c, s in zip(copies, starts))
    return error, norms, moved


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("clip_grad", [0.0, 0.05])
def test_updates_equal_torch_adamw(hf_path, workers, role, clip_grad):
    ((error, norms, moved),) = workers.run(1, _against_adamw, hf_path, role, clip_grad)
    assert error < 1e-6 < 1e-4 < moved
    for found, expected in norms:
        assert found == pytest.approx(expected, rel=1e-5)
        assert found > 0.05  # otherwise nothing would be clipped


def _decay_by_parameter(hf_path):
    trained = _start(hf_path)
    decays = {}
    for group in trained.optimizer.param_groups:
        for p in group["params"]:
            decays.setdefault(p.dim(), set()).add(group["weight_decay"])
    return decays


def test_biases_and_norms_do_not_decay(hf_path, workers):
    assert workers.run(1, _decay_by_parameter, hf_path) == [{1: {0.0}, 2: {0.1}}]


def _not_finite(hf_path, dtype, gradient):
    """Norm of a step with such a gradient, and how far parameters went in it and in the next."""
    trained = _start(hf_path, model={"dtype": dtype}, optimizer={"actor_learning_rate": 0.1})
    parameters = list(trained.chunks[0].parameters())
    norms, moved = [], []
    for value in (gradient, None):
        before = [p.detach().clone() for p in parameters]
        trained.forward_backward()
        if value is not None:
            parameters[0].main_grad[0] = value
        norms.append(float(optimizer_step(trained.optimizer)))
        moved.append(max(float((p - b).abs().max()) for p, b in zip(parameters, before)))
        assert all(p.grad is None for p in parameters)
    return norms, moved


# 1e30 is finite, its square in float32 is not.
@pytest.mark.parametrize("dtype,gradient", [("float32", math.nan), ("bfloat16", 1e30)])
def test_a_norm_that_is_not_finite_updates_nothing(hf_path, workers, dtype, gradient):
    ((norms, moved),) = workers.run(1, _not_finite, hf_path, dtype, gradient)
    assert [math.isfinite(norm) for norm in norms] == [False, True]
    assert moved[0] == 0 < 1e-3 < moved[1]


def _bfloat16(hf_path, distributed):
    """Norm and value head before, after one and after ten updates of about 1e-3 in each weight.

    Returns for each [(weight, main parameter)] at these three times.
    """
    trained = _start(
        hf_path,
        "critic",
        model={"dtype": "bfloat16", "value_head_init_std": 2.0},
        optimizer={"adam_eps": 1e-12, "critic_clip_grad": 0.0, "weight_decay": 0.0},
        parallel={"use_distributed_optimizer": distributed},
    )
    (model,) = trained.model
    parameters = list(model.parameters())
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    assert {p.main_grad.dtype for p in parameters} == {torch.float32}
    assert {p.main_param.dtype for p in parameters} == {torch.float32}
    watched = [model.decoder.final_layernorm.weight, model.output_layer.weight]
    times = [[(w.detach().clone(), w.main_param.view_as(w).clone()) for w in watched]]
    for update in range(10):
        set_learning_rate(trained.optimizer, 1e-3)
        trained.forward_backward()
        optimizer_step(trained.optimizer)
        if update in (0, 9):
            times.append([(w.detach().clone(), w.main_param.view_as(w).clone()) for w in watched])
    return list(zip(*times))


@pytest.mark.parametrize("distributed", [False, True])
def test_bfloat16_weights_have_float32_main_parameters(hf_path, workers, distributed):
    # From 1 to 2 bfloat16 is spaced by 2^-7 = 0.0078: one update of 1e-3 rounds away, ten do not.
    (watched,) = workers.run(1, _bfloat16, hf_path, distributed)
    assert len(watched) == 2
    for (start, start_main), (one, one_main), (ten, ten_main) in watched:
        large = (start.abs() >= 1.01) & (start.abs() < 2)
        assert large.sum() > 5
        assert torch.equal(one[large], start[large])
        # Adam's first update is its learning rate in every weight.
        moved = (one_main - start_main).abs()[large]
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=1e-3, atol=0)
        assert torch.equal(start_main, start.float()) and torch.equal(ten, ten_main.bfloat16())
        assert (ten[large] != start[large]).float().mean() > 0.5


class _Fused(torch.autograd.Function):
    """A linear layer that adds its weight's gradient to main_grad, as Transformer Engine's does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        weight.main_grad.addmm_(grad.t().float(), x.float())
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, math.nan)  # not to be read


class _Layer(torch.nn.Linear):
    fuse_wgrad_accumulation = False

    def forward(self, x):
        return _Fused.apply(x, self.weight) if self.fuse_wgrad_accumulation else super().forward(x)


def _gradients_of_a_layer():
    """DDP's gradient of 300 equal microbatches in bfloat16, and whether the layer was fused."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = make_config(Layout())
    if groups._current is None:
        groups.initialize(config.parallel)
    settings = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, calculate_per_token_loss=True
    )
    layer = _Layer(4, 2, bias=False).bfloat16()
    (wrapped,) = build_ddp([layer], config.parallel, settings)
    x = torch.full((3, 4), 1.0625, dtype=torch.bfloat16)
    for _ in range(300):
        wrapped(x).float().sum().backward()
    return layer.fuse_wgrad_accumulation, layer.weight.main_grad.clone()


def test_layers_add_their_gradients_to_ddps_buffer_themselves(workers):
    ((fused, gradient),) = workers.run(1, _gradients_of_a_layer)
    # 300 microbatches of 3 tokens; bfloat16 rounds 3 * 1.0625 = 3.1875 not at all.
    assert fused and gradient.dtype == torch.float32
    assert gradient.unique().tolist() == [300 * 3 * 1.0625]
