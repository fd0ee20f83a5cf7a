"""Inside a worker: the actor and the critic of the package, through one update.

Nothing of the training step is replaced. The problem's responses go through the package's plan
(which rank, which microbatch), its counts, its schedule and its losses; every parameter's gradient
is gathered in full and compared with the float64 reference on every rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.cut import select
from tests.distributed import mutations
from tests.distributed.problem import (
    CLIP_GRAD,
    GAE,
    LEARNING_RATE,
    LENGTHS,
    LOSSES,
    ON_ONE_AXIS,
    OPTIMIZER,
    SEQUENCES,
    TEMPERATURE,
    Problem,
)
from tests.layouts import Layout, parallel_fields
from tests.weights.peft_directory import lora_fields
from vapo_megatron.config import VapoConfig
from vapo_megatron.weights.peft_files import wanted_tensors

PACKED, SMALL, UNPACKED = Layout().budget, 250, 1
"""Token budgets: one or two microbatches on a rank, several, one for each response."""


NOT_GIVEN = (
    "rollout_logprobs", "old_logprobs", "reference_logprobs", "values", "advantages", "returns",
)  # fmt: skip
"""What given responses have not."""


def losses_of(role: str, layout: Layout) -> dict[str, Any]:
    """Name -> settings of the losses that a layout computes."""
    several = sum(size > 1 for size in (layout.tp, layout.pp, layout.dp, layout.cp)) > 1
    left_out = ON_ONE_AXIS if several or layout.dtype != "float32" else ()
    return {name: loss for name, loss in LOSSES[role].items() if name not in left_out}


class Measured(NamedTuple):
    """Relative errors against float64, the largest over all ranks; see `relative`."""

    gradients: dict[str, dict[str, float]]
    """[loss][HF name]"""
    losses: dict[str, float]
    """[loss]"""
    outputs: float
    """Largest |difference| of log-probabilities and entropies, or values, before the update."""
    advantages: dict[str, float]
    """[unit of GAE]: of a critic; advantages and returns from its own values."""
    grad_norm: float
    updates: dict[str, float]
    """[HF name]: of what one optimizer update adds to the parameter."""
    tokens: list[list[int]]
    """[data-parallel rank][microbatch]: tokens of its sequences."""
    num_correct: list[int]
    """[data-parallel rank]: correct responses."""


def _lora(hf_path: str) -> dict[str, Any]:
    """Of a directory that has adapters in it."""
    adapter = Path(hf_path, "adapter")
    return lora_fields(adapter) if adapter.exists() else {}


def make_config(layout: Layout, hf_path: str, algorithm: dict[str, Any]) -> VapoConfig:
    return VapoConfig.model_validate(
        {
            "model": {
                "hf_path": hf_path,
                "dtype": layout.dtype,
                "make_vocab_size_divisible_by": 8,
                "layer_spec": "local",
                "lora": _lora(hf_path),
            },
            "parallel": parallel_fields(layout, max_tokens_per_microbatch=layout.budget),
            "rollout": {"temperature": TEMPERATURE},
            "algorithm": algorithm,
            "optimizer": {
                **OPTIMIZER,
                "actor_clip_grad": CLIP_GRAD,
                "critic_clip_grad": CLIP_GRAD,
            },
        }
    )


def measure(
    hf_path: str, file: str, role: str, problem: Problem, layout: Layout, mutation: str = ""
) -> Measured:
    """Compute outputs, each of the role's losses, and an update; a worker's function.

    Args:
        file: of the role's float64.Reference.
        mutation: a name in mutations.MUTATIONS, or none.
    """
    from vapo_megatron.parallel import groups

    torch.manual_seed(dist.get_rank())
    here = groups.initialize(make_config(layout, hf_path, {}).parallel)
    reference = torch.load(file, weights_only=False)
    plan = _plan(layout)
    with mutations.applied(mutation):
        model = _build(hf_path, role, layout, here)
        outputs = _outputs(model, role, problem, plan[here.dp_rank], here)
        difference = (outputs.double() - reference.outputs[_rows(plan[here.dp_rank])]).abs()
        gradients, losses = {}, {}
        advantages = {
            unit: _advantages(problem, outputs, plan[here.dp_rank], here, unit, expected)
            for unit, expected in reference.advantages.items()
        }
        for name, settings in losses_of(role, layout).items():
            loss, found = _gradients(model, role, problem, plan[here.dp_rank], here, settings)
            expected = reference.losses[name]
            gradients[name] = _compared(found, expected.gradients)
            losses[name] = abs(loss - expected.loss) / abs(expected.loss)
        norm, updates = _update(model, role, here)
    correct = [sum(bool(problem.is_correct[p]) for m in rank for p in m) for rank in plan]
    return Measured(
        gradients,
        losses,
        _largest(torch.cat([difference.flatten(), difference.new_zeros(1)]).max())[0],
        advantages,
        abs(norm - reference.grad_norm) / reference.grad_norm,
        _compared(updates, reference.updates),
        [[sum(SEQUENCES[p] for p in m) for m in rank] for rank in plan],
        correct,
    )


def relative(found: Tensor, reference: Tensor, whole: Tensor | None = None) -> float:
    """|found - reference| / |whole| in 2-norms; NaN counts as infinitely wrong.

    whole: what found is a part of; None: the reference.
    """
    size = (reference if whole is None else whole).norm()
    if size == 0:
        # Of an expert that none of the loss's tokens chose.
        return 0.0 if not found.any() else float("inf")
    error = float((found.double() - reference).norm() / size)
    return error if error == error else float("inf")


def _whole(name: str, reference: dict[str, Tensor]) -> Tensor:
    """What a parameter's error is measured against: its own gradient; of a key's bias, all three's.

    A bias of the keys moves all scores of a query by nearly the same: what the softmax leaves of
    its gradient is a small difference of large numbers, whose rounding says nothing of the layout.
    Megatron holds it in one parameter with those of the queries and values.
    """
    if not name.endswith("k_proj.bias"):
        return reference[name]
    return torch.cat([reference[name.replace("k_proj", f"{of}_proj")] for of in "qkv"])


def _compared(found: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    assert set(found) == set(reference), set(found) ^ set(reference)
    errors = torch.tensor(
        [relative(t, reference[name], _whole(name, reference)) for name, t in found.items()]
    )
    return dict(zip(found, _largest(errors)))


def _largest(errors: Tensor) -> list[float]:
    """Over all ranks: a replica that drifts from the others shows on its own rank alone."""
    largest = errors.double().nan_to_num(nan=float("inf")).reshape(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def _plan(layout: Layout) -> list[list[list[int]]]:
    """[data-parallel rank][microbatch] -> responses, as the trainer plans a mini-batch."""
    from vapo_megatron.data.packing import attention_tokens, plan_step

    plan = plan_step(
        SEQUENCES,
        mini_batch_size=len(LENGTHS),
        dp_size=layout.dp,
        max_tokens_per_microbatch=layout.budget,
        seed=0,
        attention_tokens=attention_tokens(4096),
    )
    return plan.mini_batches[0].ranks


def _rows(mine: list[list[int]]) -> list[int]:
    """Rows of [T] that belong to a rank's responses, in their order."""
    ends = torch.tensor([response for _, response in LENGTHS]).cumsum(0).tolist()
    return [t for m in mine for p in m for t in range(ends[p] - LENGTHS[p][1], ends[p])]


def _build(hf_path: str, role: str, layout: Layout, here: Any) -> Any:
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.roles.actor import Actor
    from vapo_megatron.roles.critic import Critic

    shape, config = read_model_shape(hf_path), make_config(layout, hf_path, {})
    if role == "actor":
        return Actor(shape, config, here, hf_path)
    critic, lora = Critic(shape, config, here, hf_path), config.model.lora
    if lora.path is not None:
        # A B of zeros would leave A without a gradient; float32, so there are no other copies.
        from vapo_megatron.weights.peft import load_adapters

        assert layout.dtype == "float32"
        load_adapters(critic.placed.model, shape, lora.path, here, lora)
    return critic


def _outputs(model: Any, role: str, problem: Problem, mine: list[list[int]], here: Any) -> Tensor:
    batch = select(problem.batch(), [p for m in mine for p in m])
    microbatches = _microbatches(batch, mine, model.config, here)
    if role == "critic":
        return model.compute_values(microbatches)
    return torch.stack(model.compute_logprobs(microbatches), -1)


def _advantages(
    problem: Problem, values: Tensor, mine: list[list[int]], here: Any, unit: str, expected: Tensor
) -> float:
    """Error of the advantages and returns that a layout's own values give, the larger."""
    from vapo_megatron.config import AlgorithmConfig
    from vapo_megatron.roles.advantages import with_advantages

    algorithm = AlgorithmConfig(advantage_whitening=True, **GAE[unit])
    batch = select(problem.batch(), [p for m in mine for p in m]).replace(values=values)
    batch = with_advantages(None, batch, algorithm, here)
    rows = _rows(mine)
    errors = [
        relative(found, expected[i, rows]) if rows else 0.0
        for i, found in enumerate((batch.advantages, batch.returns))
    ]
    return _largest(torch.tensor(max(errors)))[0]


def _microbatches(batch: Any, mine: list[list[int]], config: VapoConfig, here: Any) -> list:
    """As the trainer cuts a step."""
    from vapo_megatron.models.partition import microbatch_options
    from vapo_megatron.parallel.minibatches import make_microbatches

    cut = microbatch_options(config.model, config.parallel, here)
    return make_microbatches(batch, map(len, mine), **cut)


def _gradients(
    model: Any, role: str, problem: Problem, mine: list[list[int]], here: Any, settings: Any
) -> tuple[float, dict[str, Tensor]]:
    """(loss over all ranks, its finished gradients)."""
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel import minibatches
    from vapo_megatron.roles.advantages import with_policy_mask, with_positive_examples
    from vapo_megatron.weights.gather import full_gradients

    algorithm = settings._asdict()
    scale, shift = (algorithm.pop(f"advantage_{n}", d) for n, d in (("scale", 1), ("shift", 0)))
    batch = problem.batch(scale, shift)
    batch = select(batch, [p for m in mine for p in m])
    if algorithm.get("policy_loss") == "none":
        # As given responses come: nothing but their tokens.
        batch = batch.replace(**dict.fromkeys(NOT_GIVEN))
    tree = model.config.model_dump()
    model.config = VapoConfig.model_validate({**tree, "algorithm": algorithm})
    batch, _ = with_policy_mask(batch, model.config.algorithm, here)
    batch = with_positive_examples(batch, model.config.algorithm)
    microbatches = _microbatches(batch, mine, model.config, here)
    (mini_batch,) = minibatches.make_mini_batches(microbatches, [len(mine)], here)
    metrics = model.compute_gradients(mini_batch)
    shape = read_model_shape(tree["model"]["hf_path"])
    return float(metrics["loss"]), _learned(model, full_gradients, shape, here, role)


def _learned(model: Any, gather: Any, shape: Any, here: Any, role: str) -> dict[str, Tensor]:
    """What `gather` yields of all that is trained."""
    chunks, lora = model.placed.chunks, model.config.model.lora
    named = {n: t.clone() for n, t in gather(chunks, shape, here, role=role)}
    if lora.rank is None:
        return named
    if gather.__name__ == "full_gradients":
        assert not any(t.any() for n, t in named.items() if n != "score.weight"), "it is frozen"
    of_adapters = {n: t.clone() for n, t in gather(chunks, shape, here, role=role, lora=lora)}
    unused = of_adapters.keys() - wanted_tensors(shape, lora).keys()
    assert not any(of_adapters.pop(name).any() for name in unused), "it belongs to no target"
    return {n: t for n, t in named.items() if n == "score.weight"} | of_adapters


def _update(model: Any, role: str, here: Any) -> tuple[float, dict[str, Tensor]]:
    """(gradient norm, what the update added to each parameter), from the last loss's gradients."""
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel.optimizer import optimizer_step, set_learning_rate
    from vapo_megatron.weights.gather import gather_hf_tensors

    def full() -> dict[str, Tensor]:
        shape = read_model_shape(model.config.model.hf_path)
        named = _learned(model, gather_hf_tensors, shape, here, role)
        return {name: tensor.double() for name, tensor in named.items()}

    before = full()
    set_learning_rate(model.placed.optimizer, LEARNING_RATE)
    norm = float(optimizer_step(model.placed.optimizer))
    return norm, {name: after - before[name] for name, after in full().items()}
