"""Write a small commented configuration for a model at hand and the machine it is run on.

  vapo init --model models/Qwen2.5-0.5B --data data/problems.parquet
  vapo init --model models/Qwen2.5-0.5B --data problems.jsonl --gpus 8 --out runs/first.yaml

Lengths come from the data's longest prompt and the model's positions, the layout from the GPUs that
are found, as vapo plan chooses it. What is written passes vapo train --config FILE --dry-run; its
comments say which fields to look at first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vapo_megatron.cli.command import Parser, run
from vapo_megatron.cli.plan_options import natural
from vapo_megatron.config import DataConfig, RolloutConfig, VapoConfig, load_config
from vapo_megatron.data.storage import replace_file
from vapo_megatron.errors import ConfigError, UserError
from vapo_megatron.models.hf_config import ModelShape, read_model_shape
from vapo_megatron.rollout.requests import with_own_limits
from vapo_megatron.weights.table import parameter_count

_PROMPT_COLUMNS = ("prompt", "problem", "question")
_PROMPT_TOKENS = 1024
"""Where no data says how long prompts are."""

_TEMPLATE = """\
# Written by `vapo init` for {name} ({count:,} parameters)
# on {machine}: small, to see it run. Fields left out have their defaults, the paper's where it
# gives one; `vapo train --help` lists all. `--config grpo` after this file trains with GRPO.
#
#   vapo train --config {out} --dry-run     checks everything, and prints what it takes
#   vapo train --config {out}               trains; the same command resumes
model:
  hf_path: {hf_path}
  # float32 on a CPU, bfloat16 on GPUs.
  dtype: {dtype}
parallel:
  # One process for each GPU. `vapo plan --config {out} ...` compares other layouts.
{parallel}
rollout:
{rollout}
data:
  # One problem in a row; `vapo prepare` makes such a file of other data.
  train_path: {train_path}
  prompt_column: {prompt_column}
  # The ground truth; null if there is none.
  answer_column: answer
reward:
  # Judges answers as mathematics. A function of your own: path/to/file.py:NAME.
  verifier: math
algorithm:
  # Each step samples group_size responses to each of responses_per_step / group_size prompts, and
  # makes responses_per_step / mini_batch_size updates. The paper has 8192, 16 and 512.
  responses_per_step: {responses}
  group_size: {group}
  mini_batch_size: {mini_batch}
  # Steps in which the critic alone learns, then steps in which both do.
  value_pretraining_steps: {value_steps}
  policy_steps: {policy_steps}
  # lambda = 1 - 1 / (alpha * length) for the actor: alpha * length should be about 20. Set it once
  # you know how long your responses are; 0.05 is for 400 tokens and more.
  length_adaptive_alpha: {alpha:g}
optimizer:
  # Small models bear larger rates; these are the paper's, without its long warm-up.
  actor_learning_rate: 1.0e-6
  critic_learning_rate: 2.0e-6
  actor_warmup_updates: 10
  critic_warmup_updates: 10
evaluation:
  # Held-out problems, in the same columns; null: none. every_steps and samples say how often and
  # how well.
  path: null
logging:
  # Metrics, rollouts, checkpoints, the trained model and the report.
  run_dir: {run_dir}
"""


class _Sizes(NamedTuple):
    responses: int
    group: int
    mini_batch: int
    value_steps: int
    policy_steps: int
    response_tokens: int
    """At most."""
    microbatch_tokens: int
    """At most, but at least a sequence's: memory holds the logits of all of them."""


_ON_CPU = _Sizes(32, 8, 16, 2, 20, 512, 2048)
_ON_GPU = _Sizes(512, 16, 64, 10, 100, 4096, 8192)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 2 for a user's mistake; 130 when interrupted."""

    def work() -> str:
        options = _parser().parse_args(argv)
        text = configuration(options.model, options.data, options.gpus, options.out)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.out, text)
        try:
            check(options.out, options.data)
        except BaseException:
            options.out.unlink()
            raise
        return f"{options.out}"

    return run("init", work, interrupted="nothing was written")


def configuration(model: Path, data: Path | None, gpus: int | None, out: Path) -> str:
    """Return the file's text.

    Args:
        model: Hugging Face directory.
        data: of the problems; None: not known yet.
        gpus: to train on; None: those of this machine.
        out: the file's path, for its comments.

    Raises:
        UserError: a file is missing or wrong, the model fits on no layout, or `out` exists.
    """
    if out.exists():
        raise ConfigError(f"--out={out} exists; remove it, or give another file")
    shape = read_model_shape(model, "--model")
    bytes_of_gpu = _gpus() if gpus is None else [80 * 10**9] * gpus
    sizes = _ON_GPU if bytes_of_gpu else _ON_CPU
    column, longest = _read(model, data)
    limits = with_own_limits(RolloutConfig(), shape, longest)
    response = min(limits.max_response_tokens, sizes.response_tokens)
    rollout = {"max_prompt_tokens": longest, "max_response_tokens": response}
    algorithm = {
        "responses_per_step": sizes.responses, "group_size": sizes.group,
        "mini_batch_size": sizes.mini_batch,
    }  # fmt: skip
    parallel: dict[str, Any] = {
        "world_size": 1,
        "max_tokens_per_microbatch": max(sizes.microbatch_tokens, longest + response),
    }
    if bytes_of_gpu:
        base = {"rollout": rollout, "algorithm": algorithm,
                "parallel": {**parallel, "world_size": len(bytes_of_gpu)}}  # fmt: skip
        parallel, rollout = _layout(shape, VapoConfig.model_validate(base), min(bytes_of_gpu))
    machine = f"{len(bytes_of_gpu)} GPUs" if bytes_of_gpu else "a CPU"
    return _TEMPLATE.format(
        name=model.name, count=parameter_count(shape), machine=machine, out=out,
        hf_path=_value(str(model)), dtype="bfloat16" if bytes_of_gpu else "float32",
        parallel=_fields(parallel), rollout=_fields(rollout),
        train_path=_value(None if data is None else str(data)), prompt_column=_value(column),
        # As of responses half as long as they may be.
        alpha=max(0.05, round(40 / response, 3)), run_dir=_value(f"runs/{out.stem}"),
        **sizes._asdict(),
    )  # fmt: skip


def check(out: Path, data: Path | None) -> None:
    """Refuse what a dry run of the file would refuse. Raises UserError."""
    from vapo_megatron.cli.preflight import check_run

    config = load_config(out)
    if data is not None:
        check_run(config, None, all_answers=True)


def _read(model: Path, data: Path | None) -> tuple[str, int]:
    """Return the column of prompts, and the longest one's tokens, rounded up to 64."""
    if data is None:
        return _PROMPT_COLUMNS[0], _PROMPT_TOKENS
    from vapo_megatron.rollout.inputs import read_prompts
    from vapo_megatron.rollout.tokenizer import load_tokenizer

    tokenizer, found = load_tokenizer(model), []
    for column in _PROMPT_COLUMNS:
        columns = DataConfig(prompt_column=column)
        try:
            rows = read_prompts(
                str(data), columns, tokenizer, seed=0, shuffle=False, max_prompt_tokens=sys.maxsize
            )
        except UserError as error:
            found.append(error)
            continue
        longest = max(len(rows.tokens(index)) for index in range(len(rows)))
        return column, -(-longest // 64) * 64
    raise found[0]


def _gpus() -> list[int]:
    """Return the memory of each of this machine's GPUs, in bytes."""
    import torch

    count = torch.cuda.device_count()
    return [torch.cuda.get_device_properties(i).total_memory for i in range(count)]


def _layout(
    shape: ModelShape, base: VapoConfig, gpu_bytes: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of parallel and of rollout of the fastest plan that fits."""
    from vapo_megatron.planning import describe
    from vapo_megatron.planning.cluster import Cluster
    from vapo_megatron.planning.ranking import Fixed, rank
    from vapo_megatron.planning.workload import workload_of

    count = base.parallel.world_size
    cluster = Cluster(num_gpus=count, gpus_per_node=min(8, count), gpu_bytes=gpu_bytes)
    ranking = rank(shape, base, cluster, workload_of(base), Fixed())
    if not ranking.plans:
        raise ConfigError(describe.describe_misfit(shape, ranking, cluster)[1])
    pasted = yaml.safe_load(describe.to_paste(ranking.plans[0].config))
    default = VapoConfig().model_dump()
    kept = {
        part: {name: value for name, value in pasted[part].items()
               if value != default[part][name] or name == "world_size"}
        for part in ("parallel", "rollout")
    }  # fmt: skip
    return kept["parallel"], kept["rollout"]


def _fields(fields: dict[str, Any]) -> str:
    return "\n".join(f"  {name}: {_value(value)}" for name, value in fields.items())


def _value(value: object) -> str:
    """Return a scalar as YAML has it."""
    return yaml.safe_dump(value, width=10**6).removesuffix("\n").removesuffix("\n...")


def _parser() -> Parser:
    usage = "vapo init --model DIR [--data FILE] [options]"
    parser = Parser(prog="vapo init", usage=usage, description=__doc__)
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="Hugging Face directory"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FILE",
        help="JSONL or parquet of the problems to train on (default: to be filled in)",
    )  # fmt: skip
    parser.add_argument(
        "--gpus", type=natural, metavar="N",
        help="train on N GPUs of 80 GB; 0: on a CPU (default: the GPUs of this machine)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("run.yaml"), metavar="FILE", help="(default: run.yaml)"
    )
    return parser
