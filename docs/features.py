"""The tables of docs/limits.md that say which features go together: every pair is tried.

A pair goes together if the configuration's rules accept the overrides of both.
"""

from __future__ import annotations

from collections.abc import Mapping

from vapo_megatron.config import ConfigError, load_config

FEATURES: Mapping[str, str] = {
    "dynamic sampling": "algorithm.dynamic_sampling=true",
    "one step off": "rollout.placement=disaggregated rollout.num_processes=8 rollout.lag=1",
    "partial rollouts": "rollout.carry_over_groups=8",
    "shared queue": "rollout.shared_queue=true",
    "sampler's log-probabilities": "rollout.behaviour=sampler",
    "sampler correction": "algorithm.sampler_correction=tis",
    "log-probability limit": "rollout.max_logprob_difference=0.1",
    "reward model": "model.reward_hf_path=models/reward reward.verifier=reward_model",
    "rewards from scores": "reward.from_score=[0,1]",
    "critic's own prompts": "data.critic_prompt_column=hint",
    "several files": "data.sources.a.path=a.jsonl",
    "GRPO": "algorithm.advantage_estimator=grpo algorithm.value_pretraining_steps=0",
    "value pretraining alone": "algorithm.stage=value_pretraining",
    "DIS loss": "algorithm.policy_loss=dis",
    "given responses": "data.response_column=response algorithm.policy_loss=none"
    " algorithm.advantage_estimator=none algorithm.value_pretraining_steps=0"
    " algorithm.group_size=1",
    "LM loss by advantage": "algorithm.positive_lm_weight=advantage",
    "bounded values": "algorithm.value_range=[-2,2]",
    "FP8": "model.fp8=hybrid",
}
"""Name -> the overrides that switch it on."""

PARALLELISM: Mapping[str, str] = {
    "TP": "parallel.tensor_model_parallel_size=2",
    "TP, sequence parallel": "parallel.tensor_model_parallel_size=2"
    " parallel.sequence_parallel=true",
    "PP": "parallel.pipeline_model_parallel_size=2",
    "interleaved PP": "parallel.pipeline_model_parallel_size=4"
    " parallel.virtual_pipeline_model_parallel_size=2",
    "CP": "parallel.context_parallel_size=2",
    "DP": "parallel.use_distributed_optimizer=false",
    "DP, distributed optimizer": "parallel.overlap_grad_reduce=true"
    " parallel.overlap_param_gather=true",
    "vLLM with TP": "rollout.tensor_model_parallel_size=4",
}
"""As FEATURES, on the 8 processes of BASE."""

BASE = "parallel.world_size=8 model.hf_path=models/base"


def tables() -> str:
    """Return both tables in Markdown, and below them why a pair is refused."""
    reasons: dict[str, int] = {}
    numbers = {name: str(i) for i, name in enumerate(FEATURES, 1)}
    lines = _row("", *numbers.values()) + _row(*["---"] * (len(FEATURES) + 1))
    for name, overrides in FEATURES.items():
        cells = [_cell(overrides, other, reasons) for other in FEATURES.values()]
        at = list(FEATURES).index(name)
        lines += _row(f"{numbers[name]} {name}", *cells[:at], *[""] * (len(cells) - at))
    lines += ["", *_row("", *PARALLELISM), *_row(*["---"] * (len(PARALLELISM) + 1))]
    for name, overrides in FEATURES.items():
        cells = [_cell(overrides, other, reasons) for other in PARALLELISM.values()]
        lines += _row(name, *cells)
    lines += ["", "Why:", "", *(f"- {letter(i)}: {why}" for why, i in reasons.items())]
    lines += ["", "Switched on by:", ""]
    lines += [f"- {name}: `{overrides}`" for name, overrides in FEATURES.items()]
    return "\n".join(lines) + "\n"


def letter(number: int) -> str:
    """Return a, b, c, ... for 0, 1, 2, ..."""
    return chr(ord("a") + number)


def refusal(*overrides: str) -> str | None:
    """Return the rule that refuses the overrides together; None: they are accepted."""
    try:
        load_config([], " ".join((BASE, *overrides)).split())
    except ConfigError as error:
        return str(error)
    return None


def _cell(one: str, other: str, reasons: dict[str, int]) -> str:
    why = None if one == other else refusal(one, other)
    if why is None:
        return "+"
    return letter(reasons.setdefault(why, len(reasons)))


def _row(*cells: str) -> list[str]:
    return [f"| {' | '.join(cells)} |"]
