"""How much value pretraining locks and keys needs: a critic against exact values, after each pass.

    python examples/tiny/credit/pretraining.py BASE [--responses 512] [--passes 8] [--mini-batch 16]
                                               [--learning-rate 5e-4] [--final-learning-rate 5e-4]
                                               [--form keys] [--lambdas]

Trains a critic, started from the base model, on responses that the base model could have written
(keys.write_response), in plain PyTorch and without a sampler, so that a setting takes a minute.
Measured on 192 fresh responses to held-out problems:

    error of V           root mean square of V - exact V
    explained variance   of the rewards by V, and in brackets by the exact values
    correlation          of the estimated and the true advantage of the keys chosen
    noise                mean |advantage| of filler tokens over that of key tokens

--lambdas adds the correlation for several lambdas of the advantage, for all responses and by their
length: with --form keys_mixed, whose tokens the base model of 20 locks knows too, 5 to 20 locks.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import measure
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from credit import keys, measures
from vapo_megatron.algorithm.gae import decoupled_gae
from vapo_megatron.algorithm.lambdas import length_adaptive_lambda

FORMS = [name for name, form in keys.FORMS.items() if not form.num_rare]
ALPHA = 0.05
LAMBDAS: tuple[float, ...] = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
ALPHAS = (0.05, 0.1, 0.2, 0.5)


@dataclasses.dataclass(frozen=True)
class Responses:
    """B responses and their prompts."""

    ids: Tensor
    """int64 [B, L], prompts and responses, padded on the right."""
    spans: list[slice]
    """Of each row: the states before the tokens of the response."""
    lengths: Tensor
    """int64 [B], tokens of the responses"""
    rewards: Tensor
    """float32 [B]"""
    records: list[measures.Response]
    exact: measures.Exact


def write_responses(
    count: int,
    tokenizer: PreTrainedTokenizerBase,
    form: keys.Form,
    *,
    held_out: bool,
    seed: int,
) -> Responses:
    """Write responses as the base model does, with their exact values."""
    rng = random.Random(f"keys, value pretraining, {held_out}, {seed}")
    stop = tokenizer.eos_token_id
    ids, spans, records = [], [], []
    for _ in range(count):
        problem = keys.draw_problem(rng, held_out=held_out, form=form)
        text = keys.write_response(rng, problem, form)
        prompt, response = tokenizer([problem.prompt, text])["input_ids"]
        response.append(stop)
        ids.append(prompt + response)
        spans.append(slice(len(prompt) - 1, len(ids[-1]) - 1))
        reward = 1.0 if keys.count_open(problem, text) >= problem.goal else -1.0
        # Each key was chosen with probability 1/2.
        logprobs = np.full(len(response), np.log(0.5))
        tokens = tokenizer.convert_ids_to_tokens(response)
        records.append(measures.Response(problem, tokens, reward, logprobs, None, None))
    longest = max(map(len, ids))
    return Responses(
        torch.tensor([row + [stop] * (longest - len(row)) for row in ids]),
        spans,
        torch.tensor([len(record.tokens) for record in records]),
        torch.tensor([record.reward for record in records]),
        records,
        measures.exact(records),
    )


class Critic(torch.nn.Module):
    """The base model with a value head that starts at V = 0."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.body = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32).model
        self.head = torch.nn.Linear(self.body.config.hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)

    def forward(self, responses: Responses, rows: Sequence[int]) -> Tensor:
        """Return V before each token of some responses, one after another."""
        hidden = self.body(responses.ids[rows], use_cache=False).last_hidden_state
        values = self.head(hidden)[..., 0]
        return torch.cat([v[responses.spans[i]] for v, i in zip(values, rows, strict=True)])


def compare(
    values: Tensor, fresh: Responses, lambda_actor: Tensor | float, rows: Sequence[int]
) -> measures.Credit:
    """Compare values, and the advantages that follow from them, with the exact ones.

    Args:
        values: V before each token of the fresh responses.
        fresh: responses that the critic was not trained on.
        lambda_actor: of the advantages, see decoupled_gae.
        rows: responses to compare.
    """
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), fresh.lengths.cumsum(0)])
    token_rewards = torch.zeros_like(values)
    token_rewards[bounds[1:] - 1] = fresh.rewards
    advantages, _ = decoupled_gae(token_rewards, values, bounds, lambda_actor=lambda_actor)
    v, a = (each.double().split(fresh.lengths.tolist()) for each in (values, advantages))
    records = [
        dataclasses.replace(fresh.records[i], values=v[i].numpy(), advantages=a[i].numpy())
        for i in rows
    ]
    known = fresh.exact
    parts = ([known.paths[i] for i in rows], known.chances, [known.values[i] for i in rows])
    return measures.credit(records, measures.Exact(*parts))


@torch.no_grad()
def values_of(critic: Critic, responses: Responses) -> Tensor:
    """Return V before each token of all responses."""
    rows = torch.arange(len(responses.ids)).split(64)
    return torch.cat([critic(responses, part.tolist()) for part in rows])


def train(critic: Critic, data: Responses, args: argparse.Namespace, fresh: Responses) -> None:
    """Train a critic and print how good it is after each pass."""
    optimizer = torch.optim.AdamW(critic.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    updates = args.passes * (len(data.ids) // args.mini_batch)
    adaptive = length_adaptive_lambda(fresh.lengths, ALPHA)
    done = 0
    for number in range(1, args.passes + 1):
        order = torch.randperm(len(data.ids))
        for part in order.split(args.mini_batch)[: len(data.ids) // args.mini_batch]:
            rate = args.learning_rate
            rate += ((args.final_learning_rate or rate) - rate) * done / updates
            optimizer.param_groups[0]["lr"] = rate
            returns = data.rewards[part].repeat_interleave(data.lengths[part])
            loss = 0.5 * (critic(data, part.tolist()) - returns).square().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
            optimizer.step()
            done += 1
        found = compare(values_of(critic, fresh), fresh, adaptive, range(len(fresh.ids)))
        print(
            f"{len(data.ids)} responses, pass {number}, {done} updates: "
            f"error of V {found.value_error:.3f}, "
            f"explained variance {found.explained_variance:.3f} "
            f"({found.best_explained_variance:.3f}), "
            f"correlation {found.key_correlation:.3f}, noise {found.noise_ratio:.3f}",
            flush=True,
        )


def by_lambda(values: Tensor, fresh: Responses) -> str:
    """Return a table of the correlation by lambda, for all responses and by their length."""
    order = fresh.lengths.argsort().tolist()
    third = len(order) // 3
    parts = {"all": order}
    if fresh.lengths.min() < fresh.lengths.max():
        for part in (order[:third], order[third:-third], order[-third:]):
            low, high = (int(fresh.lengths[i]) for i in (part[0], part[-1]))
            parts[f"{low} to {high} tokens"] = part
    chosen: dict[str, Tensor | float] = {f"{value:g}": value for value in LAMBDAS}
    for alpha in ALPHAS:
        chosen[f"adaptive, alpha {alpha:g}"] = length_adaptive_lambda(fresh.lengths, alpha)
    rows = [["lambda", *parts], ["---"] * (1 + len(parts))]
    for name, chosen_lambda in chosen.items():
        found = [compare(values, fresh, chosen_lambda, part) for part in parts.values()]
        shown = (each.key_correlation for each in found)
        rows.append([name, *("-" if c is None else f"{c:.3f}" for c in shown)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Pretrain critics on the numbers of responses asked for."""
    parser = argparse.ArgumentParser(description="Measure value pretraining on locks and keys.")
    parser.add_argument("base", type=Path, help="HF directory from base.py")
    parser.add_argument("--responses", type=int, nargs="+", default=[512])
    parser.add_argument("--passes", type=int, default=8, help="over these responses")
    parser.add_argument("--mini-batch", type=int, default=16, help="responses of an update")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--final-learning-rate", type=float, help="reached linearly (the same)")
    parser.add_argument("--fresh", type=int, default=192, help="responses to measure on")
    parser.add_argument("--form", choices=FORMS, default="keys", help="of the task (keys)")
    parser.add_argument("--lambdas", action="store_true", help="compare lambdas of the advantage")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if wrong := measure.not_a_model(args.base):
        sys.exit(wrong)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(str(args.base))
    form = keys.FORMS[args.form]
    fresh = write_responses(args.fresh, tokenizer, form, held_out=True, seed=args.seed)
    for count in args.responses:
        torch.manual_seed(args.seed)
        data = write_responses(count, tokenizer, form, held_out=False, seed=args.seed)
        critic = Critic(args.base)
        train(critic, data, args, fresh)
        if args.lambdas:
            print(by_lambda(values_of(critic, fresh), fresh), flush=True)


if __name__ == "__main__":
    main()
