"""Resume with an Adam whose state is like that of NVIDIA's fused ones, megatron-core's choice.

The layout is that of apex's and Transformer Engine's (2.20) optimizers: `step`, an int, in the
parameter group, not advanced for a group without parameters on this rank, and bias_correction
beside it; per parameter exp_avg and exp_avg_sq in float32, and nothing else, which loading refuses.
A stand-in in plain torch has it, under the name by which megatron-core imports apex's, so that
megatron-core takes its branches for it. Not exercised: the fused kernels.
"""

import pytest

from tests.run.checkpoint.test_load import SAVED_AT, train
from tests.weights.tiny_hf import write_tiny_hf
from tests.workers import WorkerPool

STAND_IN = """
import torch


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self, params, lr, weight_decay, betas, eps, adam_w_mode=True, capturable=False
    ):
        assert adam_w_mode and not capturable
        defaults = dict(
            lr=lr, bias_correction=True, weight_decay=weight_decay, betas=betas, eps=eps
        )
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            assert group["bias_correction"] and type(group["step"]) is int
            (beta1, beta2), step = group["betas"], group["step"]
            for p in group["params"]:
                assert p.dtype is torch.float32 and p.grad.dtype is torch.float32
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                assert set(state) == {"exp_avg", "exp_avg_sq"}
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
                p.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))

    def load_state_dict(self, state_dict):
        for state in state_dict["state"].values():
            assert set(state) <= {"exp_avg", "exp_avg_sq"}, set(state)
        super().load_state_dict(state_dict)


class FusedSGD(torch.optim.SGD):
    pass
"""


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """Processes in which megatron-core finds the stand-in."""
    directory = tmp_path_factory.mktemp("stand_in")
    package = directory / "apex" / "optimizers"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text(STAND_IN)
    # One that is imported already is not hidden on a CPU.
    pool = WorkerPool("spawn", first=["apex.optimizers"])
    plain = pool.run

    def run(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(directory)  # inherited by processes that are spawned now
            return plain(*args)

    pool.run = run
    yield pool
    pool.close()


def _adam():
    import vapo_megatron.parallel  # noqa: F401

    # isort: split
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    return optimizer.Adam.__name__, distrib_optimizer.USING_APEX_OPTIMIZER


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return write_tiny_hf(tmp_path_factory.mktemp("hf"), tied=False, seed=0)


def test_megatron_core_takes_it(fused):
    assert fused.run(1, _adam) == [("FusedAdam", True)]


SETTINGS = [
    (dtype, distributed, "adamw")
    for dtype in ("float32", "bfloat16")
    for distributed in (False, True)
]


@pytest.mark.parametrize(
    ("settings", "saved_at", "ranks"),
    [
        (("bfloat16", True, "adamw"), 0, 1),
        *[pytest.param(s, 0, 2, marks=pytest.mark.slow) for s in SETTINGS],
        *[pytest.param(s, SAVED_AT, 2, marks=pytest.mark.slow) for s in SETTINGS],
    ],
)
def test_resumed_losses(fused, hf, tmp_path, settings, saved_at, ranks):
    """Data-parallel ranks; at 0, before the first update, there is no state yet."""
    straight, _ = fused.run(ranks, train, hf, tmp_path, settings, 1, 1, False, saved_at)[0]
    resumed, _ = fused.run(ranks, train, hf, tmp_path, settings, 1, 1, True, saved_at)[0]
    assert resumed == straight[saved_at:] and abs(straight[0] - straight[-1]) > 0.01


@pytest.mark.parametrize(
    ("distributed", "saved_at", "ranks"),
    [
        (True, 0, 1),
        pytest.param(False, 0, 2, marks=pytest.mark.slow),
        pytest.param(False, SAVED_AT, 2, marks=pytest.mark.slow),
        pytest.param(True, SAVED_AT, 2, marks=pytest.mark.slow),
    ],
)
def test_its_checkpoints_and_torchs_are_the_same(
    fused, workers, hf, tmp_path, distributed, saved_at, ranks
):
    """A run that resumes with the other optimizer installed gives the same results."""
    settings = ("float32", distributed, "adamw")
    for there, here in ((fused, workers), (workers, fused)):
        root = tmp_path / str(here is fused)
        straight, _ = there.run(ranks, train, hf, root, settings, 1, 1, False, saved_at)[0]
        resumed, _ = here.run(ranks, train, hf, root, settings, 1, 1, True, saved_at)[0]
        assert resumed == pytest.approx(straight[saved_at:], rel=1e-5)
