"""Make the tiny task's reward model: `make_reward_model.py --base DIR --out DIR --seed 0`.

DIR becomes a Hugging Face directory for model.critic_hf_path: Qwen2ForSequenceClassification with
one label. The model starts from the base model and learns to score a response at its last token, as
reward models usually do: sigmoid(score) is the probability that the answer is correct. A quarter of
its training responses are sampled from the base model on training problems; few of those are
correct. The others are constructed chains: half of them are truncated at a random token, possibly
the first, and wrong; about half of the rest are correct.

The model therefore learns that an incomplete response is bad. As a value function, read before
every token, it has the bias of a critic initialised from a reward model (VC-PPO, arXiv 2503.01491):
it predicts a low return early in every response, and how low depends on the scale of the logit,
which is not tied to the reward. `report` measures this. A reward model trained to regress the
reward of whole chains only has no such bias, and a critic that starts from it works from the first
step.

One that is right about less than .9 of constructed chains is trained on. In this time two layers
learn only that guesses make a chain wrong. They cannot check the base model's many direct answers
and score them all as wrong, which most of them are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import making
import sampling
import task
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2ForSequenceClassification,
    logging,
)

RIGHT, WRONG = 1.0, -1.0
"""reward.correct and reward.incorrect of the trainer's defaults."""


@dataclasses.dataclass(frozen=True)
class Recipe(making.Training):
    """Training responses and training of the reward model."""

    iterations: int = 300
    batch_size: int = 32
    learning_rate: float = 3e-3
    final_learning_rate: float = 1e-4
    base: str = ""
    """Hash of the base model's weights."""
    sampled: int = 1024
    """Responses sampled from the base model; training draws from them with replacement."""
    sampled_share: float = 0.25
    cut_share: float = 0.5
    """Share of the constructed chains that are truncated, and therefore wrong."""
    empty_share: float = 0.1
    """Share of the truncated chains that are empty; the others keep a uniform number of tokens."""
    computed_share: float = 0.5
    """Share of the constructed chains without a guess: correct unless truncated."""
    least_guess: float = 0.6
    most_guess: float = 1.0
    """Each other chain's share of guessed steps is uniform between these two."""
    held_out: int = 512
    """Held-out responses of each kind in the report."""
    least_right: float = 0.9
    """Of the held-out constructed chains, as the mean over right and wrong ones."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """A response and its reward."""

    prompt: list[int]
    response: list[int]
    """Includes the stop token, unless the response reached the length limit."""
    reward: float


def constructed(
    rng: random.Random, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, held_out: bool
) -> Scored:
    """Draw a problem and write a chain: computed or with many guesses, whole or truncated."""
    problem = task.draw_problem(rng, held_out=held_out)
    guess = 0.0
    if rng.random() >= recipe.computed_share:
        guess = rng.uniform(recipe.least_guess, recipe.most_guess)
    text = task.chain(rng, problem, guess=guess, guess_product=guess)
    reward = RIGHT if text.endswith(task.direct_answer(problem.answer)) else WRONG
    prompt, response = tokenizer([problem.prompt, text])["input_ids"]
    if rng.random() < recipe.cut_share:
        # Leave out at least the answer, which is the last two tokens.
        left = 0 if rng.random() < recipe.empty_share else rng.randint(1, len(response) - 2)
        return Scored(prompt, response[:left], WRONG)
    return Scored(prompt, [*response, tokenizer.eos_token_id], reward)


def sampled(
    base: Path, tokenizer: PreTrainedTokenizerBase, problems: list[task.Problem], seed: int
) -> list[Scored]:
    """Sample the base model's response to each problem, rewarded by the exact answer."""
    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32).eval()
    prompts = tokenizer([p.prompt for p in problems])["input_ids"]
    stop = tokenizer.eos_token_id
    responses = sampling.sample(model, prompts, stop_token_id=stop, seed=seed)
    found = []
    texts = tokenizer.batch_decode(responses)
    for problem, prompt, response, text in zip(problems, prompts, responses, texts, strict=True):
        right = text.endswith(task.direct_answer(problem.answer) + tokenizer.eos_token)
        found.append(Scored(prompt, response, RIGHT if right else WRONG))
    return found


def pad(batch: Sequence[Scored], padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return right-padded ids [b, s], each last token's position [b], and rewards float32 [b]."""
    lengths = torch.tensor([len(s.prompt) + len(s.response) for s in batch])
    ids = torch.full((len(batch), int(lengths.max())), padding)
    for row, scored in enumerate(batch):
        ids[row, : lengths[row]] = torch.tensor(scored.prompt + scored.response)
    return ids, lengths - 1, torch.tensor([s.reward for s in batch])


def build_model(base: Path, recipe: Recipe) -> Qwen2ForSequenceClassification:
    """Add a new head with one label to the base model, initialised from N(0, 1/H)."""
    model = Qwen2ForSequenceClassification.from_pretrained(
        str(base), num_labels=1, dtype=torch.float32
    )
    # transformers scores the last token that is not padding, and the base pads with its stop token.
    model.config.pad_token_id = 0
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        width = model.score.weight.shape[1]
        model.score.weight.normal_(0.0, width**-0.5, generator=generator)
    return model


def losses(
    model: Qwen2ForSequenceClassification,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    own: list[Scored],
) -> Iterator[tuple[Tensor, float]]:
    """Yield each iteration's binary cross-entropy, as a tensor and as a number to show."""
    rng = random.Random(f"tiny reward model, {recipe.seed}")

    def draw(_: float, count: int) -> list[Scored]:
        return [
            rng.choice(own)
            if rng.random() < recipe.sampled_share
            else constructed(rng, recipe, tokenizer, held_out=False)
            for _ in range(count)
        ]

    for batch, _ in recipe.batches(rng, draw, lambda s: len(s.prompt) + len(s.response)):
        ids, last, rewards = pad(batch, padding=0)
        hidden = model.model(ids, use_cache=False).last_hidden_state
        scores = model.score(hidden[torch.arange(len(ids)), last])[:, 0]
        loss = binary_cross_entropy_with_logits(scores, (rewards == RIGHT).float())
        yield loss, float(loss.detach())


@torch.no_grad()
def read_values(model: Qwen2ForSequenceClassification, scored: list[Scored]) -> list[Tensor]:
    """Return per response a float32 [l + 1]: V before each token, then the score at the last."""
    found = []
    for start in range(0, len(scored), 64):
        batch = scored[start : start + 64]
        ids, last, _ = pad(batch, padding=0)
        values = model.score(model.model(ids, use_cache=False).last_hidden_state)[..., 0]
        for row, end, one in zip(values, last.tolist(), batch, strict=True):
            found.append(row[end - len(one.response) : end + 1].clone())
    return found


def report(model: Qwen2ForSequenceClassification, scored: list[Scored]) -> dict[str, float]:
    """Measure the score at the last token, and V before each token.

    Returns:
        right_share; accuracy and balanced_accuracy (mean over both classes) of the score's sign at
        the last token; over every earlier token, explained_variance and mean of V, with the mean
        return.
    """
    model.eval()
    rewards = torch.tensor([s.reward for s in scored])
    values = read_values(model, scored)
    scores = torch.stack([v[-1] for v in values])
    hit = (scores > 0) == (rewards > 0)
    earlier = torch.cat([v[:-1] for v in values])
    returns = rewards.repeat_interleave(torch.tensor([len(v) - 1 for v in values]))
    return {
        "right_share": float((rewards > 0).float().mean()),
        "accuracy": float(hit.float().mean()),
        "balanced_accuracy": float(
            (hit[rewards > 0].float().mean() + hit[rewards < 0].float().mean()) / 2
        ),
        "explained_variance_earlier": 1 - float((returns - earlier).var() / returns.var()),
        "mean_value_earlier": float(earlier.mean()),
        "mean_return_earlier": float(returns.mean()),
    }


def held_out(
    base: Path, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[Scored]]:
    """Responses to held-out problems: of the base model (two each) and constructed ones."""
    problems = task.test_problems(recipe.held_out // 2, recipe.seed)
    rng = random.Random(f"tiny reward model, held out, {recipe.seed}")
    return {
        "sampled": sampled(base, tokenizer, problems * 2, seed=recipe.seed + 1),
        "constructed": [
            constructed(rng, recipe, tokenizer, held_out=True) for _ in range(recipe.held_out)
        ],
    }


def make(directory: Path, base: Path, recipe: Recipe) -> bool:
    """Make the HF directory unless it already holds this recipe's model; True: it was made."""
    weights = hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    recipe = dataclasses.replace(recipe, base=weights)
    sources = [sys.modules[__name__], making, sampling, task]
    return making.make(
        directory, recipe, sources, "reward model", lambda partial: write(partial, base, recipe)
    )


def write(directory: Path, base: Path, recipe: Recipe) -> None:
    """Train, showing progress, and write weights, config, tokenizer and report."""
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    own = sampled(base, tokenizer, task.training_problems(recipe.sampled, recipe.seed), recipe.seed)
    model = build_model(base, recipe)
    responses = held_out(base, recipe, tokenizer)
    making.train(
        "reward model", recipe, model, losses=lambda drawn: losses(model, drawn, tokenizer, own),
        measure=lambda: report(model, responses["constructed"])["balanced_accuracy"],
        what="held-out chains",
    )  # fmt: skip
    reports = {name: report(model, scored) for name, scored in responses.items()}
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "report.json").write_text(json.dumps(reports, indent=2) + "\n")


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
    """Make the reward model and print its report on held-out responses."""
    parser = making.options("Make the tiny task's reward model.")
    parser.add_argument("--base", type=Path, required=True, help="HF directory of the base model")
    args = parser.parse_args()
    if wrong := not_a_model(args.base):
        parser.error(f"--base {wrong}")
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    made = make(args.out, args.base, Recipe(seed=args.seed))
    making.tell("reward model", args.out, made=made)
    for name, of_responses in json.loads((args.out / "report.json").read_text()).items():
        numbers = "  ".join(f"{k} {v:.3f}" for k, v in of_responses.items())
        print(f"held out, {name}: {numbers}")


if __name__ == "__main__":
    main()
