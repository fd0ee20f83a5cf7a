"""Measure a tiny model's accuracy and habits by sampling: `python examples/tiny/measure.py DIR`.

Uses transformers and torch only, so a base model or an exported model is checked independently of
the trainer and vLLM.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
from pathlib import Path

import task
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of `measure`; shares of the responses unless stated otherwise."""

    accuracy: float
    direct: float
    """Responses without a chain."""
    direct_accuracy: float
    """Of the direct answers."""
    chain_accuracy: float
    """Of the other responses."""
    unfinished: float
    mean_tokens: float
    """Per response, with the stop token."""
    turns: float
    """Share of the steps of turned problems, up to the first turn; 0 in a form without turns."""

    def __str__(self) -> str:
        return "  ".join(f"{k} {v:.3f}" for k, v in dataclasses.asdict(self).items())


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: list[list[int]],
    *,
    stop_token_id: int,
    seed: int,
    temperature: float = 1.0,
    max_tokens: int = task.SHORT.max_response_tokens,
) -> list[list[int]]:
    """Sample one response for each prompt.

    Args:
        model: causal language model.
        prompts: token ids; those of equal length form a batch without padding.
        stop_token_id: ends a response and is part of it.
        seed: of the sampling.
        temperature: 1 samples from the model's own distribution.
        max_tokens: of a response.

    Returns:
        Token ids in the order of the prompts, at most max_tokens each.
    """
    generator = torch.Generator().manual_seed(seed)
    by_length = collections.defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    responses: list[list[int]] = [[] for _ in prompts]
    for _, indices in sorted(by_length.items()):
        running = torch.tensor(indices)
        ids = torch.tensor([prompts[i] for i in indices])
        cache = DynamicCache(config=model.config)
        for _ in range(max_tokens):
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            ids = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            for index, token in zip(running.tolist(), ids[:, 0].tolist(), strict=True):
                responses[index].append(token)
            going = (ids[:, 0] != stop_token_id).nonzero()[:, 0]
            if len(going) == 0:
                break
            if len(going) < len(ids):
                running, ids = running[going], ids[going]
                cache.batch_select_indices(going)
    return responses


def measure(
    directory: Path,
    *,
    problems: int = 256,
    samples: int = 8,
    seed: int = 0,
    form: task.Form = task.SHORT,
) -> Report:
    """Sample at temperature 1 on held-out problems.

    Args:
        directory: HF directory.
        problems: number of held-out problems.
        samples: responses for each.
        seed: of the problems and of the sampling.
        form: of the task that the model was made for.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()
    repeated = [p for p in task.test_problems(problems, seed, form) for _ in range(samples)]
    prompts = tokenizer([p.prompt for p in repeated])["input_ids"]
    responses = sample(
        model, prompts, stop_token_id=tokenizer.eos_token_id, seed=seed,
        max_tokens=form.max_response_tokens,
    )  # fmt: skip
    texts = tokenizer.batch_decode(responses)
    stop = tokenizer.eos_token
    correct = [
        t.endswith(task.direct_answer(p.answer) + stop)
        for t, p in zip(texts, repeated, strict=True)
    ]
    direct = [t.startswith(task.ANSWER_MARKER) for t in texts]
    both = sum(c and d for c, d in zip(correct, direct, strict=True))
    turned = [t for t, p in zip(texts, repeated, strict=True) if p.turned]
    num_turned = sum("^" in t for t in turned)
    # A step ends with a comma; the one that turns counts too.
    steps = sum(t.partition("^")[0].count(",") for t in turned) + num_turned
    total, num_direct, num_correct = len(texts), sum(direct), sum(correct)
    return Report(
        accuracy=num_correct / total,
        direct=num_direct / total,
        direct_accuracy=both / max(num_direct, 1),
        chain_accuracy=(num_correct - both) / max(total - num_direct, 1),
        unfinished=sum(not t.endswith(stop) for t in texts) / total,
        mean_tokens=sum(map(len, responses)) / total,
        turns=num_turned / max(steps, 1),
    )


def not_a_model(directory: Path) -> str | None:
    """Return why a directory cannot be loaded as a model; None: it can."""
    missing = [n for n in ("config.json", "model.safetensors") if not (directory / n).is_file()]
    if not missing:
        return None
    return (
        f"{directory} is not a Hugging Face model directory: it has no {' and no '.join(missing)}"
        "; make_base_model.py --out creates one"
    )


def main() -> None:
    """Print the report of a directory."""
    parser = argparse.ArgumentParser(description="Sample a tiny model on held-out problems.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", choices=task.FORMS, default="short", help="of the task (short)")
    args = parser.parse_args()
    if wrong := not_a_model(args.directory):
        parser.error(wrong)
    torch.set_num_threads(1)
    form = task.FORMS[args.form]
    print(
        measure(
            args.directory, problems=args.problems, samples=args.samples, seed=args.seed, form=form
        )
    )


if __name__ == "__main__":
    main()
