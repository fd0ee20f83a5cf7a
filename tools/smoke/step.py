"""Section of tools/gpu_smoke.py: whole steps of VAPO on one GPU by turns, as a run makes them.

A random model answers made-up problems: vLLM samples, the verifier judges, critic and actor score
and learn, weights are synced, and whoever is idle is in host memory (parallel.offload). The peak of
each phase is compared with what `vapo plan` predicts for the same configuration, which is meant as
an upper estimate; on a CPU a peak is the process's resident memory, and there is no plan.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.smoke.models import write_random_hf
from tools.smoke.parity import rounding_bound
from tools.smoke.report import Row, judged, skipped
from tools.smoke.sampler import missing_vllm
from tools.smoke.sizes import Sizes, StepLoad
from vapo_megatron.config import VapoConfig, load_config
from vapo_megatron.planning.memory import PHASES, PhaseMemory
from vapo_megatron.planning.plan import peak_memory

ABOVE_PLAN = 1.05
"""A peak of so many times the plan's fails."""


def step(sizes: Sizes, directory: Path) -> Iterator[Row]:
    """Run the steps; rows for what was learned, and for each phase."""
    if missing_vllm():
        yield skipped("step", missing_vllm())
        return
    load = sizes.step
    config = step_config(load, directory / "step")
    metrics = run(config, load.num_steps)
    yield from learned(config, load, metrics)
    planned = None
    if torch.cuda.is_available():
        gpu_bytes = torch.cuda.get_device_properties(0).total_memory
        planned = peak_memory(load.shape, config, gpu_bytes)
    yield from peaks(metrics, planned)


def step_config(load: StepLoad, directory: Path) -> VapoConfig:
    """Write a random model, a tokenizer and problems; return a configuration that uses them."""
    model = directory / "model"
    write_random_hf(model, load.shape, "actor", seed=4, dtype=torch.bfloat16)
    _write_tokenizer(model)
    problems = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(8) for b in (1, 2)]
    data = directory / "train.jsonl"
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    # What auto comes to, for the plan, which takes auto for Transformer Engine.
    local = importlib.util.find_spec("transformer_engine") is None
    stop = sorted(random.Random(0).sample(range(load.shape.vocab_size), load.num_stop_tokens))
    return load_config(
        [],
        [
            f"model.hf_path={model}", f"data.train_path={data}", f"rollout.stop_token_ids={stop}",
            f"logging.run_dir={directory / 'run'}", "logging.tensorboard=false",
            "logging.progress='off'", "logging.rollout_groups=0", "checkpoint.hf_export=false",
            "algorithm.value_pretraining_steps=0", f"algorithm.policy_steps={load.num_steps}",
            "model.value_head_init_std=0.02", "optimizer.actor_warmup_updates=0",
            "optimizer.critic_warmup_updates=0", "parallel.offload=true",
            "rollout.verify_sync_every=1", *["model.layer_spec=local"] * local,
            *load.overrides,
        ],
    )  # fmt: skip


def run(config: VapoConfig, num_steps: int) -> list[dict[str, Any]]:
    """Return the metrics that each step writes; None for what is not finite."""
    from vapo_megatron.training.step import StepTrainer

    with StepTrainer(config) as trainer, trainer.output.opened(0):
        for done in range(1, num_steps + 1):
            metrics = trainer.train_step(done - 1)
            trainer.output.step(done, metrics)
    lines = (Path(config.logging.run_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def learned(config: VapoConfig, load: StepLoad, metrics: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Judge the steps: gradients there are, and vLLM agrees with the trainer.

    The random model's log-probabilities have a spread of about 1 nat, so that what rounding
    explains (parity.py) is a difference in nats; the mean of its absolute value is less.
    """
    last = metrics[-1]
    for role in config.algorithm.trained_roles:
        norm = last[f"{role}/grad_norm"]
        norm = math.nan if norm is None else norm
        is_good = norm > 0 and last[f"{role}/skipped_updates"] == 0
        case = f"{role}'s updates, step {len(metrics)}"
        figures = {"grad_norm": norm}
        yield Row("step", case, f"gradient norm {norm:.3g}", "norm > 0", is_good, figures)
    bound = math.sqrt(2) * rounding_bound(load.shape, config.model.dtype, passes=1)
    for number, of_step in enumerate(metrics, 1):
        difference = of_step["rollout/logprob_diff_mean"]
        difference = math.nan if difference is None else difference
        case = f"log-probabilities of vLLM and the trainer, step {number}"
        yield judged("step", case, "mean difference in nats", difference, bound)
    seconds, rate = last["time/step_seconds"], last["tokens_per_second"]
    figures = {"seconds": seconds, "tokens_per_second": rate}
    tokens = last["rollout/response_length_mean"]
    measured = f"{seconds:.1f} s, {rate:,.0f} response tokens/s, {tokens:.0f} a response"
    yield Row("step", f"whole step {len(metrics)}", measured, figures=figures)


def peaks(
    metrics: Sequence[dict[str, Any]], planned: dict[str, PhaseMemory] | None
) -> Iterator[Row]:
    """Compare each phase's highest peak with the plan's, and give the last step's seconds.

    planned: by phase; None: there is nothing to compare with.
    """
    for phase in PHASES:
        name = f"memory/{phase}_peak_bytes"
        if name not in metrics[-1]:
            continue
        peak = max(of_step[name] for of_step in metrics)
        seconds = metrics[-1][f"time/{phase}_seconds"]
        figures = {"peak_bytes": peak, "seconds": seconds}
        measured, limit, fits = f"{seconds:.2f} s, peak {peak / 1e9:.2f} GB", "", True
        if planned is not None:
            total = planned[phase].total
            figures["planned_bytes"] = float(total)
            measured += f" of {total / 1e9:.2f} planned, {100 * peak / total:.0f} %"
            limit, fits = f"<= {100 * ABOVE_PLAN:.0f} %", peak <= ABOVE_PLAN * total
        yield Row("step", phase, measured, limit, fits, figures)


def _write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of a few words; what else a random model samples has no text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "+", "=", *map(str, range(20))]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(directory)
