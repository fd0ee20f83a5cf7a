"""How much value pretraining locks and keys needs: a critic against exact values, after each pass.

    python examples/tiny/keys_pretraining.py BASE [--responses 512] [--passes 8] [--mini-batch 16]
                                             [--learning-rate 5e-4] [--final-learning-rate 5e-4]

Trains a critic, started from the base model, on responses that the base model could have written
(keys.write_response), in plain PyTorch and without a sampler, so that a setting takes a minute.
Measured on 192 fresh responses to held-out problems:

    error of V           root mean square of V - exact V
    explained variance   of the rewards by V, and in brackets by the exact values
    correlation          of the estimated and the true advantage of the keys chosen
    noise                mean |advantage| of filler tokens over that of key tokens
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import keys
import keys_credit
import measure
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from vapo_megatron.algorithm.gae import decoupled_gae
from vapo_megatron.algorithm.lambdas import length_adaptive_lambda

FORM = keys.FORMS["keys"]
ALPHA = 0.05


@dataclasses.dataclass(frozen=True)
class Responses:
    """B responses of equal length T, and their prompts."""

    ids: Tensor
    """int64 [B, S + T]"""
    rewards: Tensor
    """float32 [B]"""
    records: list[keys_credit.Response]
    exact: keys_credit.Exact


def write_responses(
    count: int, tokenizer: PreTrainedTokenizerBase, *, held_out: bool, seed: int
) -> Responses:
    """Write responses as the base model does, with their exact values."""
    rng = random.Random(f"keys, value pretraining, {held_out}, {seed}")
    ids, records = [], []
    for _ in range(count):
        problem = keys.draw_problem(rng, held_out=held_out, form=FORM)
        text = keys.write_response(rng, problem, FORM)
        prompt, response = tokenizer([problem.prompt, text])["input_ids"]
        response.append(tokenizer.eos_token_id)
        ids.append(prompt + response)
        reward = 1.0 if keys.count_open(problem, text) >= problem.goal else -1.0
        # Each key was chosen with probability 1/2.
        logprobs = np.full(len(response), np.log(0.5))
        tokens = tokenizer.convert_ids_to_tokens(response)
        records.append(keys_credit.Response(problem, tokens, reward, logprobs, None, None))
    rewards = torch.tensor([record.reward for record in records])
    return Responses(torch.tensor(ids), rewards, records, keys_credit.exact(records))


class Critic(torch.nn.Module):
    """The base model with a value head that starts at V = 0."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.body = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32).model
        self.head = torch.nn.Linear(self.body.config.hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor, length: int) -> Tensor:
        """Return V before each of the last `length` tokens, [B, length]."""
        hidden = self.body(ids, use_cache=False).last_hidden_state
        return self.head(hidden)[:, -length - 1 : -1, 0]


@torch.no_grad()
def compare(critic: Critic, fresh: Responses) -> keys_credit.Credit:
    """Compare a critic's values, and the advantages that follow from them, with the exact ones."""
    length = len(fresh.records[0].tokens)
    values = critic(fresh.ids, length)
    lengths = torch.full((len(values),), length)
    token_rewards = torch.zeros_like(values)
    token_rewards[:, -1] = fresh.rewards
    bounds = torch.arange(len(values) + 1, dtype=torch.int32) * length
    advantages, _ = decoupled_gae(
        token_rewards.flatten(), values.flatten(), bounds,
        lambda_actor=length_adaptive_lambda(lengths, ALPHA),
    )  # fmt: skip
    found = zip(values.double().numpy(), advantages.view_as(values).double().numpy(), strict=True)
    records = [
        dataclasses.replace(record, values=v, advantages=a)
        for record, (v, a) in zip(fresh.records, found, strict=True)
    ]
    return keys_credit.credit(records, fresh.exact)


def train(critic: Critic, data: Responses, args: argparse.Namespace, fresh: Responses) -> None:
    """Train a critic and print how good it is after each pass."""
    length = len(data.records[0].tokens)
    optimizer = torch.optim.AdamW(critic.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    updates = args.passes * (len(data.ids) // args.mini_batch)
    done = 0
    for number in range(1, args.passes + 1):
        order = torch.randperm(len(data.ids))
        for part in order.split(args.mini_batch)[: len(data.ids) // args.mini_batch]:
            rate = args.learning_rate
            rate += ((args.final_learning_rate or rate) - rate) * done / updates
            optimizer.param_groups[0]["lr"] = rate
            loss = 0.5 * (critic(data.ids[part], length) - data.rewards[part, None]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
            optimizer.step()
            done += 1
        found = compare(critic, fresh)
        print(
            f"{len(data.ids)} responses, pass {number}, {done} updates: "
            f"error of V {found.value_error:.3f}, "
            f"explained variance {found.explained_variance:.3f} "
            f"({found.best_explained_variance:.3f}), "
            f"correlation {found.key_correlation:.3f}, noise {found.noise_ratio:.3f}",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Pretrain critics on the numbers of responses asked for."""
    parser = argparse.ArgumentParser(description="Measure value pretraining on locks and keys.")
    parser.add_argument("base", type=Path, help="HF directory from keys_base.py")
    parser.add_argument("--responses", type=int, nargs="+", default=[512])
    parser.add_argument("--passes", type=int, default=8, help="over these responses")
    parser.add_argument("--mini-batch", type=int, default=16, help="responses of an update")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--final-learning-rate", type=float, help="reached linearly (the same)")
    parser.add_argument("--fresh", type=int, default=192, help="responses to measure on")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if wrong := measure.not_a_model(args.base):
        sys.exit(wrong)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(str(args.base))
    fresh = write_responses(args.fresh, tokenizer, held_out=True, seed=args.seed)
    for count in args.responses:
        torch.manual_seed(args.seed)
        data = write_responses(count, tokenizer, held_out=False, seed=args.seed)
        train(Critic(args.base), data, args, fresh)


if __name__ == "__main__":
    main()
