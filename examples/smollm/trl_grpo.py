"""One run of TRL's GRPO for compare_trl.py: steps of sampled responses, timed part by part.

A step is one batch of sampled responses and the updates on it. Written to --out: steps.jsonl (a
line for each step: seconds in all and by part, mean reward) and the model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from vapo_megatron.data.problems import Problem
from vapo_megatron.reward.gym_verifier import COLUMN, ReasoningGymVerifier


def main() -> None:
    """Train and write."""
    options = _parser().parse_args()
    torch.set_num_threads(1)
    updates = options.responses // options.mini_batch
    config = GRPOConfig(
        output_dir=str(options.out / "trl"), use_cpu=True, bf16=False, report_to="none",
        seed=options.seed, max_steps=options.steps * updates, save_strategy="no",
        logging_strategy="no", disable_tqdm=True,
        # One update takes mini_batch responses; a batch of sampled ones lasts for all updates.
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.mini_batch // options.micro_batch,
        generation_batch_size=options.responses, num_generations=options.group,
        num_iterations=1, max_completion_length=options.max_response_tokens, temperature=1.0,
        beta=0.0, learning_rate=options.learning_rate, lr_scheduler_type="constant",
        loss_type=options.loss, adam_beta2=options.adam_beta2, weight_decay=0.0, max_grad_norm=1.0,
        # Its default computes activations twice, to save memory that there is here.
        gradient_checkpointing=False, shuffle_dataset=False,
    )  # fmt: skip
    rows = pyarrow.parquet.read_table(options.data).to_pylist()
    spent = defaultdict[str, float](float)
    rewards = list[float]()
    trainer = GRPOTrainer(
        model=str(options.model),
        reward_funcs=_scorer(spent, rewards),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": r["prompt"], COLUMN: r[COLUMN]} for r in rows]),
        callbacks=[_Steps(options.out / "steps.jsonl", updates, spent, rewards)],
    )
    trainer._generate = _timed(trainer._generate, spent, "generation")
    trainer.train()
    trainer.save_model(str(options.out / "model"))
    trainer.processing_class.save_pretrained(str(options.out / "model"))


def _scorer(spent: dict[str, float], rewards: list[float]) -> Callable[..., list[float]]:
    """Return a reward function over the scorer that the other side's workers call."""
    verifier = ReasoningGymVerifier()

    def score(completions: Sequence[str], **columns: Any) -> list[float]:
        start = time.perf_counter()
        found = []
        for text, row in zip(completions, columns[COLUMN], strict=True):
            (verdict,) = verifier.score([text], [Problem("", "", {COLUMN: row}, None)])
            found.append(1.0 if verdict.status == "correct" else -1.0)
        rewards.extend(found)
        spent["scoring"] += time.perf_counter() - start
        return found

    return score


def _timed(call: Callable[..., Any], spent: dict[str, float], part: str) -> Callable[..., Any]:
    def timed(*arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments, **keywords)
        finally:
            spent[part] += time.perf_counter() - start

    return timed


class _Steps(TrainerCallback):
    """Writes a line whenever the updates on one batch of responses are done."""

    def __init__(
        self, path: Path, updates: int, spent: dict[str, float], rewards: list[float]
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._updates, self._spent, self._rewards = updates, spent, rewards
        self._start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._updates == 0:
            self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._updates:
            return
        seconds = time.perf_counter() - self._start
        parts = {part: self._spent.pop(part, 0.0) for part in ("generation", "scoring")}
        line = {
            "seconds": seconds,
            **parts,
            "update": seconds - sum(parts.values()),
            "reward": sum(self._rewards) / len(self._rewards),
        }
        self._rewards.clear()
        print(json.dumps(line), file=self._file, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="prompts in their order")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    for name in ("steps", "responses", "group", "mini-batch", "micro-batch", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--max-response-tokens", type=int, required=True)
    parser.add_argument("--adam-beta2", type=float, required=True)
    parser.add_argument("--loss", required=True, help="TRL's loss_type")
    return parser


if __name__ == "__main__":
    main()
