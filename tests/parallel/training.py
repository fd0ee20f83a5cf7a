"""A fixed batch, an actor-like and a critic-like loss, and a few updates of them, inside a worker.

The responses and everything that the losses need are the same in every layout; only which rank and
microbatch sees them differs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.cut import batch_of, select
from tests.layouts import Layout, parallel_fields
from vapo_megatron.config import VapoConfig
from vapo_megatron.data.batch import RolloutBatch
from vapo_megatron.data.microbatch import make_microbatch
from vapo_megatron.models.build import build_model, gather_hidden, output_weight
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.models.partition import microbatch_options
from vapo_megatron.models.value_head import values_of
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.context import gather_tokens
from vapo_megatron.parallel.logprobs import linear_logprobs
from vapo_megatron.parallel.optimizer import optimizer_step, set_learning_rate
from vapo_megatron.parallel.reduce import sum_over_data_parallel
from vapo_megatron.parallel.schedule import forward_backward, forward_only
from vapo_megatron.roles.trained import optimizer_of, wrap
from vapo_megatron.weights.gather import full_gradients, gather_hf_tensors
from vapo_megatron.weights.load_hf import load_hf_weights

# (prompt, response) tokens; the empty response is a prompt that no loss reads.
LENGTHS = ((3, 5), (2, 9), (6, 1), (4, 12), (5, 0), (1, 7), (3, 4))
TEMPERATURE = 0.8
ENTROPY_COEF = 0.1
ALL = tuple(range(len(LENGTHS)))
NUM_TOKENS = sum(response for _, response in LENGTHS)
LEARNING_RATE = 3e-3


class Result(NamedTuple):
    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, Tensor]
    """By HF name, of the first update, before clipping."""
    weights: dict[str, Tensor]
    """By HF name, after the first update."""
    outputs: Tensor
    """Before the first update: log-probabilities and entropies [T, 2], or values [T], of this
    data-parallel rank's responses in the order of its microbatches."""


def make_config(layout: Layout, **sections: dict[str, Any]) -> VapoConfig:
    tree: dict[str, Any] = {
        "model": {
            "dtype": "float32",
            "make_vocab_size_divisible_by": 16,
            "value_head_init_std": 0.3,
            "layer_spec": "local",
        },
        "parallel": parallel_fields(layout),
        # With a large epsilon an update shows the gradient's scale, which Adam would hide.
        "optimizer": {
            "adam_eps": 1e-2,
            "actor_clip_grad": 0.5,
            "critic_clip_grad": 0.5,
            "weight_decay": 0.1,
        },
    }
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    return VapoConfig.model_validate(tree)


def make_batch(vocab_size: int) -> RolloutBatch:
    """Return all responses; advantages and returns are random, three tokens are masked."""
    generator = torch.Generator().manual_seed(11)
    prompts, responses = torch.tensor(LENGTHS).t()
    sequences = prompts + responses
    mask = torch.ones(NUM_TOKENS, dtype=torch.bool)
    mask[[0, 7, 20]] = False
    return batch_of(
        torch.randint(vocab_size, (int(sequences.sum()),), generator=generator),
        sequences,
        responses,
        loss_mask=mask,
        advantages=torch.randn(NUM_TOKENS, generator=generator),
        returns=torch.randn(NUM_TOKENS, generator=generator),
    )


def actor_loss(logprobs: Tensor, entropy: Tensor, batch: RolloutBatch) -> Tensor:
    per_token = -batch.advantages * logprobs - ENTROPY_COEF * entropy
    return (per_token * batch.loss_mask).sum() / NUM_TOKENS


def critic_loss(values: Tensor, batch: RolloutBatch) -> Tensor:
    return (0.5 * (values - batch.returns).square() * batch.loss_mask).sum() / NUM_TOKENS


class Trained:
    """One role's model in this layout, as roles/trained.py builds it."""

    def __init__(self, hf_path: str, layout: Layout, role: str, config: VapoConfig) -> None:
        self.role, self.layout = role, layout
        self.ranks = groups.current()
        self.shape = read_model_shape(hf_path)
        self.model = build_model(
            self.shape, config.model, config.parallel, self.ranks, role, seed=config.seed
        )
        load_hf_weights(self.model, self.shape, hf_path, self.ranks, role)
        self.chunks = wrap(self.model, config, role)
        self.optimizer = optimizer_of(self.chunks, self.model, self.shape, config, self.ranks, role)
        batch = make_batch(self.shape.vocab_size)
        options = microbatch_options(config.model, config.parallel, self.ranks)
        self.microbatches = [
            make_microbatch(select(batch, part), **options)
            for part in (layout.split or ((ALL,),))[self.ranks.dp_rank]
        ]

    def head(self, output, microbatch):
        if self.role == "critic":
            values = values_of(output)[microbatch.predicting]
            return gather_tokens(values, microbatch, self.ranks)
        hidden = gather_hidden(output, sequence_parallel=self.layout.sp)
        outputs = linear_logprobs(
            hidden[microbatch.predicting],
            output_weight(self.model[-1]),
            microbatch.targets,
            self.ranks.tp_group,
            vocab_size=self.shape.vocab_size,
            temperature=TEMPERATURE,
            with_entropy=True,
        )
        return torch.stack([gather_tokens(x, microbatch, self.ranks) for x in outputs], -1)

    def loss(self, output, microbatch):
        outputs, batch = self.head(output, microbatch), microbatch.batch
        if self.role == "critic":
            loss = critic_loss(outputs, batch)
        else:
            loss = actor_loss(outputs[:, 0], outputs[:, 1], batch)
        return loss, {"loss": loss.detach(), "tokens": batch.loss_mask.sum()}

    def forward_backward(self) -> dict[str, Tensor]:
        metrics = forward_backward(self.chunks, self.microbatches, self.loss)
        return sum_over_data_parallel(metrics, self.ranks)

    def full_tensors(self) -> dict[str, Tensor]:
        """Parameters by HF name, in full."""
        named = gather_hf_tensors(self.chunks, self.shape, self.ranks, role=self.role)
        return {name: tensor.clone() for name, tensor in named}

    def full_gradients(self) -> dict[str, Tensor]:
        """Gradients by HF name, in full."""
        named = full_gradients(self.chunks, self.shape, self.ranks, self.role)
        return {name: gradient.clone() for name, gradient in named}


def run_layout(hf_paths: dict[str, str], layout: Layout, num_updates: int = 3) -> dict[str, Result]:
    """Make a few updates of each model, "critic" or any actor; a worker's function."""
    torch.manual_seed(dist.get_rank())
    config = make_config(layout)
    groups.initialize(config.parallel)
    results = {}
    for name, hf_path in hf_paths.items():
        role = "critic" if name == "critic" else "actor"
        results[name] = _train(Trained(hf_path, layout, role, config), num_updates)
    return results


def _train(trained: Trained, num_updates: int) -> Result:
    outputs = torch.cat(forward_only(trained.chunks, trained.microbatches, trained.head))
    losses, norms, gradients, weights = [], [], {}, {}
    for update in range(num_updates):
        set_learning_rate(trained.optimizer, LEARNING_RATE)
        metrics = trained.forward_backward()
        assert int(metrics["tokens"]) == NUM_TOKENS - 3, metrics
        losses.append(float(metrics["loss"]))
        if update == 0:
            gradients = trained.full_gradients()
        norms.append(float(optimizer_step(trained.optimizer)))
        if update == 0:
            weights = trained.full_tensors()
    return Result(losses, norms, gradients, weights, outputs)
