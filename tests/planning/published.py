"""Published jobs: the options of `vapo plan` that describe them, and the figures to compare with.

    python -m tests.planning.published      prints the table of docs/planning.md

A job's settings are those of its recipe. What a source leaves open is assumed: the response lengths
spread so far that the longest reach the limit (NeMo-RL's: the planner's default), and a NeMo-RL
prompt has the tokens by which its tokens/s/GPU exceeds its mean response. No job has an efficiency
of its own.

verl does not publish its mean response length. Its job has the one for which a step takes as long
as published, so the step's ratio is 1 by construction and does not count. How the step divides into
phases is what is compared.

One step off, 4 of the 8 nodes sample and the others train, as its recipe says
(examples/configs/recipes/llm/performance/grpo-qwen3-32b-8n8g-async-1off.yaml): planned as it is.
"""

from __future__ import annotations

from typing import NamedTuple

from vapo_megatron.cli.command import Parser
from vapo_megatron.cli.plan import ranked
from vapo_megatron.cli.plan_options import add_plan
from vapo_megatron.config.phases import ACTOR_UPDATE, GENERATION, LOGPROBS
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning.plan import Plan, model_flops

STEP, TOKENS, TFLOPS = "step", "tokens/s/GPU", "TFLOP/s/GPU"
RATES = (TOKENS, TFLOPS)
"""Figures of which more is faster; all others are seconds."""


class Job(NamedTuple):
    """A published job."""

    name: str
    options: str
    """Of `vapo plan`."""
    figures: dict[str, float]
    """STEP, TOKENS, TFLOPS or a phase: as published."""
    source: str
    step_counts: bool = True
    """The step is a prediction, not what an unpublished setting was chosen for."""


class Row(NamedTuple):
    """One figure of a job."""

    job: Job
    figure: str
    predicted: float
    published: float

    @property
    def ratio(self) -> float:
        """Predicted time over published time."""
        ratio = self.predicted / self.published
        return 1 / ratio if self.figure in RATES else ratio

    @property
    def counts(self) -> bool:
        """The figure was predicted."""
        return self.job.step_counts or self.figure != STEP


_NEMO = "https://github.com/NVIDIA-NeMo/RL/blob/{}/docs/about/performance-summary.md"
# One update per step, without old log-probabilities (force_on_policy_ratio): the forward pass that
# is planned as theirs stands for the reference's, which has the same cost.
_QWEN3 = (
    " --no-critic --responses 2048 --group-size 32 --mini-batch 2048 --max-prompt 100"
    " --max-response 3996 --prompt 100 --response 3256 --tp {tp} --pp 4 --vpp 1 --vllm-tp {tp}"
    " --recompute none --max-tokens 4096 --vllm-sequences 1024"
)

JOBS = (
    Job(
        "NeMo-RL 0.7, GRPO, Qwen3-32B, 32 H100",
        "--model Qwen3-32B --gpus 32 --vllm-share 0.6" + _QWEN3.format(tp=4),
        {STEP: 323, TOKENS: 665},
        _NEMO.format("v0.7.0"),
    ),
    Job(
        "the same, one step off, 64 H100",
        "--model Qwen3-32B --gpus 64 --placement disaggregated --lag 1 --samplers 32"
        " --vllm-share 0.8" + _QWEN3.format(tp=4),
        {STEP: 161, TOKENS: 675},
        _NEMO.format("v0.7.0"),
    ),
    Job(
        "the same, 16 GB200",
        # The whole rack is one NVLink domain.
        "--model Qwen3-32B --gpus 16 --gpus-per-node 16 --gpu GB200 --vllm-share 0.6"
        + _QWEN3.format(tp=2),
        {STEP: 295, TOKENS: 1458},
        _NEMO.format("v0.7.0"),
    ),
    Job(
        "NeMo-RL 0.5, GRPO, Llama-3.1-8B, 16 H100",
        "--model Llama-3.1-8B --gpus 16 --no-critic --reference --responses 2048 --group-size 32"
        " --mini-batch 512 --max-prompt 127 --max-response 3969 --prompt 127 --response 1019 --tp 1"
        " --pp 2 --vpp 1 --vllm-tp 1 --recompute full --max-tokens 4096 --vllm-sequences 1024"
        " --vllm-share 0.6",
        {STEP: 92.8, TOKENS: 1581},
        _NEMO.format("v0.5.0"),
    ),
    Job(
        "the same, one step off",
        # 2,478 tokens/s/GPU in 64.8 s are 1,254 tokens a response, prompt included.
        "--model Llama-3.1-8B --gpus 16 --placement disaggregated --lag 1 --samplers 8 --no-critic"
        " --reference --responses 2048 --group-size 32 --mini-batch 512 --max-prompt 127"
        " --max-response 3969 --prompt 127 --response 1127 --tp 1 --pp 2 --vpp 1 --vllm-tp 1"
        " --recompute full --max-tokens 4096 --vllm-sequences 1024 --vllm-share 0.8",
        {STEP: 64.8, TOKENS: 2478},
        _NEMO.format("v0.5.0"),
    ),
    Job(
        "verl, DAPO, Qwen2.5-Math-7B, responses up to 28k, 32 H20",
        # FSDP2 with sequences split over 4 GPUs: TP 4 is closest to it.
        "--model Qwen2.5-7B --gpus 32 --gpu H20 --no-critic --responses 8192 --group-size 16"
        " --mini-batch 512 --max-prompt 2048 --max-response 28672 --prompt 128 --response 2445"
        " --spread 0.8 --tp 4 --pp 1 --vllm-tp 4 --recompute full --max-tokens 61440"
        " --vllm-share 0.8",
        {STEP: 790.1, GENERATION: 357.41, LOGPROBS: 107.71, ACTOR_UPDATE: 269.8},
        "https://verl.readthedocs.io/en/latest/advance/fully_async.html",
        step_counts=False,
    ),
    Job(
        "Megatron-LM, pretraining, Qwen2.5-32B, 16 H200",
        # TP and PP are published; 4,096 tokens and no recomputation are assumed.
        "--model Qwen2.5-32B --gpus 16 --gpu H200 --no-critic --responses 512 --group-size 2"
        " --mini-batch 256 --max-prompt 1 --max-response 4095 --prompt 1 --response 4095 --tp 4"
        " --pp 2 --vpp 1 --vllm-tp 4 --recompute none --max-tokens 4096 --vllm-share 0.8",
        {TFLOPS: 420},
        "https://github.com/NVIDIA/Megatron-LM/issues/1565",
    ),
)


MIXTURES = (
    Job(
        "verl, Qwen3.5-35B-A3B, responses up to 32k, 32 GPUs",
        # Its layers are of another kind, three in four without attention over all tokens.
        "--model Qwen3-30B-A3B --gpus 32 --no-critic --responses 512 --group-size 8"
        " --mini-batch 512 --max-prompt 2048 --max-response 32768 --prompt 256 --response 12700"
        " --tp 2 --cp 2 --pp 2 --ep 4 --vllm-tp 4 --vllm-sequences 256",
        {STEP: 547},
        "",
    ),
    Job(
        "prime-rl, fine-tuning, Qwen3-235B-A22B, 16k tokens, 32 B300",
        "--model Qwen3-235B-A22B --gpus 32 --gpu B300 --config"
        " examples/configs/algorithms/sft.yaml --responses 512 --mini-batch 128 --max-prompt 256"
        " --max-response 16128 --prompt 256 --response 16128 --spread 0.01 --tp 1 --cp 1 --ep 8"
        " --max-tokens 16384",
        {TOKENS: 3732},
        "",
    ),
)
"""Of experts; figures at second hand, and what they leave open is assumed."""


def rows(jobs: tuple[Job, ...] = JOBS) -> list[Row]:
    """Plan every job; a row per published figure."""
    found = []
    for job in jobs:
        shape, plan = planned(job)
        found += [
            Row(job, figure, predicted(shape, plan, figure), published)
            for figure, published in job.figures.items()
        ]
    return found


def planned(job: Job) -> tuple[ModelShape, Plan]:
    """Return a job's model and its plan."""
    parser = Parser()
    add_plan(parser)
    shape, _, _, ranking = ranked(parser.parse_args(job.options.split()))
    (plan,) = ranking.plans
    return shape, plan


def predicted(shape: ModelShape, plan: Plan, figure: str) -> float:
    """Return a figure as it is predicted."""
    cluster, phases = plan.cluster, plan.training.phases
    if figure == TFLOPS:
        seconds = phases[ACTOR_UPDATE].seconds
        return model_flops(shape, plan.config, plan.workload) / seconds / cluster.num_gpus / 1e12
    if figure not in (STEP, TOKENS):
        return plan.seconds[figure]
    return plan.step_seconds if figure == STEP else plan.total_tokens_per_second


def table(found: list[Row]) -> str:
    """Return docs/planning.md's table."""
    lines = ["| job | figure | predicted | published | ratio |", "|---|---|---:|---:|---:|"]
    job = None
    for row in found:
        name = f"[{row.job.name}]({row.job.source})" if row.job.source else row.job.name
        name = "" if row.job is job else name
        unit = "" if row.figure in RATES else " s"
        ratio = f"{row.ratio:.2f}" if row.counts else f"({row.ratio:.2f})"
        numbers = f"{row.predicted:,.0f}{unit} | {row.published:,.0f}{unit}"
        lines.append(f"| {name} | {row.figure.replace('_', ' ')} | {numbers} | {ratio} |")
        job = row.job
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(rows()), table(rows(MIXTURES)), sep="\n\n")
