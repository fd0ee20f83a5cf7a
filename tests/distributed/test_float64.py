"""The reference itself: its gradients are those of its losses, to more digits than float32 has.

Does not exercise the package.
"""

import pytest
import torch

from tests.distributed import float64
from tests.distributed.problem import LOSSES

STEP = 1e-6


def losses(role, model, problem, at):
    """[loss] -> value, without gradients. at: outputs that constant factors are taken from."""
    with torch.no_grad():
        if role == "critic":
            values = float64.critic_values(model, problem).tolist()
            found = {n: float64.critic_loss(values, problem, s) for n, s in LOSSES[role].items()}
        else:
            outputs = [x.tolist() for x in float64.actor_outputs(model, problem)]
            found = {
                n: float64.actor_loss(*outputs, problem, s, at[:, 0].tolist())
                for n, s in LOSSES[role].items()
            }
    return {name: result[0] for name, result in found.items()}


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_gradients_are_those_of_the_losses(references, role):
    # Along a random direction d: (L(x + h d) - L(x - h d)) / 2h = <gradient, d>. In float32 the
    # difference would have no digit left at this step.
    path, file, problem = references.get(role)
    reference = torch.load(file, weights_only=False)
    model = (float64.load_critic if role == "critic" else float64.load_float64)(path)
    parameters = dict(model.named_parameters())
    if role == "critic":
        parameters["score.weight"] = parameters.pop("lm_head.weight")
    generator = torch.Generator().manual_seed(3)
    direction = {
        n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in parameters.items()
    }

    def moved(step):
        for name, parameter in parameters.items():
            parameter.data.add_(direction[name], alpha=step)

    moved(STEP)
    up = losses(role, model, problem, reference.outputs)
    moved(-2 * STEP)
    down = losses(role, model, problem, reference.outputs)
    for name, expected in reference.losses.items():
        slope = sum(float((g * direction[n]).sum()) for n, g in expected.gradients.items())
        assert (up[name] - down[name]) / (2 * STEP) == pytest.approx(slope, rel=1e-6), name
