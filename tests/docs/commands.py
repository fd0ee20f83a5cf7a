"""The commands of the documentation, and how a test runs each of them.

A command is a line of a fenced block that begins with bash, or code within a text that looks like
one. A block is marked behind the word bash where no test can run it:

    ```bash gpu          needs a GPU
    ```bash network      downloads something
    ```bash cluster      needs several nodes, or Slurm

Every other command has a row in RUNS, which says what it is given on top so that a tiny model does
in place of a large one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.e2e.test_run import SMALL, TINY

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "examples/README.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
PAGES += sorted(f"examples/{path.name}" for path in (ROOT / "examples").glob("[a-z]*.md"))
MARKS = ("gpu", "network", "cluster")
_INLINE = re.compile(r"bash \S+|python \S+\.py|vapo \w+ \S+")
"""Not the names of commands alone."""


class Command(NamedTuple):
    """One command of a page."""

    page: str
    text: str
    """In one line, without its comment."""
    mark: str
    """One of MARKS, or empty."""


class Run(NamedTuple):
    """How commands are run."""

    start: str
    """What they begin with; the longest one that fits a command counts."""
    added: tuple[str, ...] = ()
    """What they are given on top."""
    shows: str = ""
    """What they must print."""
    is_quick: bool = False
    """In the repository, in seconds."""
    by: str = ""
    """Another test, which runs it."""


SIZES = tuple(field for field in SMALL if not field.startswith("algorithm.policy_steps="))
"""The tiny run's, for 32 responses of at most 64 tokens; value pretraining takes one step."""
TINY_RUN = (*SIZES, "algorithm.policy_steps=3")
LARGE_RUN = (
    "--config", str(TINY), *TINY_RUN, "model.hf_path=models/Qwen2.5-32B", "parallel.world_size=2",
    "parallel.pipeline_model_parallel_size=1", "parallel.use_distributed_optimizer=true",
    "parallel.virtual_pipeline_model_parallel_size=null", "rollout.tensor_model_parallel_size=1",
    "data.train_path=data/dapo_math_17k.parquet",
    "evaluation.path=data/aime_2024.parquet", "reward.overlong_buffer_tokens=16",
    "rollout.max_prompt_tokens=256", "checkpoint.every_steps=1",
    "logging.run_dir=runs/qwen2.5_32b",
)  # fmt: skip
"""The tiny run's sizes over the 32B recipe: two processes for 128."""
EVALUATION = (
    "--samples=2", "rollout.max_response_tokens=64", "rollout.kv_cache_bytes=67108864",
    "rollout.max_prompt_tokens=256", "rollout.tensor_model_parallel_size=1",
)  # fmt: skip
COLLECTED = ("--collect-only",)
"""The tests that a command chooses are found, and some are; they run by themselves."""

_TRAIN = "vapo train --config examples/configs/tiny.yaml "
RUNS = (
    Run("source tools/setup_env.sh"),
    Run("bash examples/run_vapo_tiny.sh", TINY_RUN, shows="done: runs/tiny/seed_"),
    Run("bash examples/run_vapo_tiny_judge.sh", by="tests/e2e/test_judge_server.py"),
    Run("python examples/tiny/make_judge.py", by="tests/e2e/test_judge_server.py"),
    Run("bash examples/run_vapo_smollm.sh", by="tests/examples/test_run_smollm.py"),
    Run("python examples/smollm/compare_algorithms.py", by="tests/examples/test_run_smollm.py"),
    Run("python examples/smollm/make_model.py", by="tests/examples/test_smollm.py"),
    Run("python mine/largest.py", by="tests/docs/test_your_own_task.py"),
    Run("vapo init --model models/base", by="tests/docs/test_your_own_task.py"),
    Run("vapo train --config mine/run.yaml", by="tests/docs/test_your_own_task.py"),
    Run("vapo sample --checkpoint runs/largest", by="tests/docs/test_your_own_task.py"),
    Run("bash examples/run_ablation_tiny.sh", by="tests/examples/test_ablation.py"),
    Run("bash examples/run_selection_tiny.sh", by="tests/examples/test_selection.py"),
    Run("bash examples/run_concise_tiny.sh", by="tests/examples/test_concise.py"),
    Run("bash examples/run_credit_tiny.sh", by="tests/examples/test_credit.py"),
    Run("vapo trajectories --checkpoint models/base", by="tests/e2e/test_trajectories.py"),
    Run("vapo evaluate --checkpoint models/base", by="tests/e2e/test_trajectories.py"),
    Run("bash examples/run_turns_tiny.sh", by="tests/examples/test_turns.py"),
    Run("bash examples/run_guess_tiny.sh", by="tests/examples/test_guess.py"),
    Run("bash examples/run_experts_tiny.sh", by="tests/examples/test_experts.py"),
    Run("bash examples/run_swirl_tiny.sh", by="tests/examples/test_swirl.py"),
    Run("bash examples/run_revision_tiny.sh", by="tests/examples/test_second_thoughts.py"),
    Run("bash examples/run_reflection_tiny.sh", by="tests/examples/test_second_thoughts.py"),
    Run("bash examples/run_bestof_tiny.sh", by="tests/examples/test_bestof.py"),
    Run("python examples/tiny/credit/train.py", by="tests/examples/test_keys.py"),
    Run("bash examples/run_vapo_qwen3_30b_a3b.sh --", is_quick=True, shows="world_size: 16\n"),
    Run("bash examples/run_vapo_qwen32b.sh --", is_quick=True, shows="world_size: 128\n"),
    Run("bash examples/run_vapo_qwen32b_lora.sh --", is_quick=True, shows="world_size: 8\n"),
    Run("NNODES=16", LARGE_RUN, shows="done: runs/qwen2.5_32b/report.html"),
    Run("torchrun --nnodes 16", LARGE_RUN, shows="resumed"),
    Run(_TRAIN + "logging.run_dir=runs/tiny/mine", TINY_RUN, shows="done: runs/tiny/mine"),
    Run(_TRAIN + "model.lora.rank=8", TINY_RUN, shows="done: runs/tiny/lora"),
    Run(
        _TRAIN + "--config dapo",
        (*SIZES, "algorithm.value_pretraining_steps=0", "algorithm.policy_steps=1"),
        shows="done: runs/tiny/dapo",
    ),
    Run(
        _TRAIN + "--config sft",
        (
            *SIZES, "algorithm.value_pretraining_steps=0", "algorithm.group_size=1",
            "algorithm.policy_steps=2",
        ),
        shows="done: runs/tiny/warm/report.html",
    ),
    Run(
        _TRAIN + "model.hf_path=runs/tiny/warm/hf_export", TINY_RUN,
        shows="done: runs/tiny/warm_vapo",
    ),
    Run(
        _TRAIN + "logging.run_dir=runs/tiny/values",
        (
            *SIZES, "algorithm.value_pretraining_steps=2",
            "algorithm.value_pretraining_patience=1",
        ),
        shows="done: runs/tiny/values",
    ),
    Run(
        _TRAIN + "logging.run_dir=runs/tiny/policy",
        (*SIZES, "algorithm.value_pretraining_steps=0", "algorithm.policy_steps=1"),
        shows="done: runs/tiny/policy",
    ),
    Run(
        _TRAIN + "model.hf_path=models/Qwen2.5-0.5B",
        (*TINY_RUN, "logging.run_dir=runs/tiny/own"),
        shows="done: runs/tiny/own",
    ),
    Run(_TRAIN + "data.train_path=near.jsonl", TINY_RUN, shows="done: runs/tiny/near"),
    Run(_TRAIN + "--replay", TINY_RUN, shows="done: runs/tiny/replay"),
    Run(
        _TRAIN + "--config examples/configs/one_step_off.yaml",
        # One process that trains, of the two that tests start.
        (*TINY_RUN, "parallel.world_size=1", "parallel.tensor_model_parallel_size=1"),
        shows="done: runs/tiny/one_step_off",
    ),
    Run(_TRAIN + "rollout.carry_over_groups=2", TINY_RUN, shows="done: runs/tiny/partial"),
    Run("vapo gradients collect", TINY_RUN),
    Run("vapo gradients compare"),
    Run("vapo prepare", ("--max-prompt-tokens=256", "--overwrite"), shows=" problems written"),
    Run("vapo select", (*EVALUATION, "--pass-rate", "0", "1"), shows=" kept\n"),
    Run("vapo probe self --samples runs/evaluation", by="tests/cli/probe/test_probe.py"),
    Run("vapo probe arithmetic --data data/gsm8k.jsonl", by="tests/cli/probe/test_probe.py"),
    Run("vapo states runs/trajectories.jsonl", by="tests/docs/test_trajectories.py"),
    Run("vapo plan --model Qwen2.5-32B --gpus 64", is_quick=True,
        shows=" 3354 s a step (2449 to 4830)\n"),
    Run("vapo plan --model Qwen2.5-32B --gpus 8 model.lora.rank=32", is_quick=True,
        shows="  actor: adapters of rank 32, 268.4e6 parameters (0.8% of the model's)"),
    Run("vapo plan --model Qwen3-32B --gpus 32 --vllm-share 0.6", is_quick=True,
        shows=" 271 s a step "),
    Run("vapo plan --model Qwen2.5-32B --gpus 128 --gpu-memory 80GB --max-response 131072",
        shows="TP 1 x CP 8 x PP 16"),
    Run("vapo plan --model Qwen2.5-32B --gpus 128 --gpu-memory 80GB --placement", is_quick=True,
        shows="lag 1 on 128 GPUs: 1745 s a step, 1.01 times as fast as the best colocated"),
    Run("vapo plan --model Qwen3-32B --gpus 64", is_quick=True, shows=" 122 s a step "),
    Run("vapo plan --model Qwen3-32B --gpus 16", is_quick=True, shows=" 206 s a step "),
    Run("vapo plan --model Llama-3.1-8B --gpus 16 --no", is_quick=True, shows=" 82 s a step "),
    Run("vapo plan --model Llama-3.1-8B --gpus 16 --placement", is_quick=True,
        shows=" 67 s a step "),
    Run("vapo plan --model Qwen2.5-7B", is_quick=True, shows=" 790 s a step "),
    Run("vapo plan --model Qwen2.5-7B --gpus 16 --responses 1024", is_quick=True,
        shows=" 167 s a step (122 to 241)"),
    Run("vapo plan --model Qwen2.5-32B --gpus 16", is_quick=True, shows=" 561 TFLOP/s/GPU\n"),
    Run("vapo plan --model Qwen3-30B-A3B --gpus 32", shows=" 580 s a step "),
    Run("vapo plan --model Qwen3-235B-A22B --gpus 32", shows="; 3247 with the prompts"),
    Run("vapo plan --model models/Qwen2.5-32B", shows="to paste:"),
    Run("vapo plan reshard", is_quick=True, shows="received"),
    Run("vapo sample", EVALUATION[1:], shows="--- sample 2, "),
    Run("vapo train --config vapo --dry-run", shows="hf_path: models/Qwen2.5-7B"),
    Run("vapo init", shows=".yaml"),
    Run("vapo train --config run.yaml --dry-run", shows="judged by math"),
    Run("vapo evaluate", EVALUATION, shows="avg@2"),
    Run(
        "vapo evaluate --checkpoint runs/tiny/seed_0/vapo --data data/arithmetic.parquet",
        by="tests/e2e/test_probes.py",
    ),
    Run("vapo convert to-megatron", ("--make-vocab-size-divisible-by=8",)),
    Run("vapo convert to-hf"),
    Run("vapo report"),
    Run("vapo benchmark gae", ("--responses=16", "--tokens=4000", "--max-length=1000")),
    Run("vapo benchmark logprobs", ("--tokens=64", "--vocab-size=512", "--hidden=64", "--pairs=1")),
    Run("vapo benchmark reshard", ("--hidden=256", "--layers=2", "--vocab-size=512",
                                   "--repeats=1", "--processes=2")),
    Run("OMP_NUM_THREADS=1 vapo benchmark gae", ("--responses=16", "--tokens=4000",
                                                 "--max-length=1000")),
    Run("OMP_NUM_THREADS=2 vapo benchmark logprobs", ("--tokens=64", "--vocab-size=512",
                                                      "--hidden=64", "--pairs=1")),
    Run("python docs/make_images.py", ("--out=pictures",), shows="pictures/learning_curve.svg"),
    Run("python docs/make_reference.py", by="tests/docs/test_reference.py"),
    Run("python tools/gpu_smoke.py --device cpu --small", by="tests/gpu/test_tool.py"),
    Run("python examples/tiny/make_reward_model.py", by="tests/e2e/test_tiny_reward_model.py"),
    Run("bash tests/run.sh", COLLECTED),
    Run("bash tests/run.sh tests/algorithm", shows=" passed"),
    Run("bash tests/run.sh --environment newest", by="tests/tools/test_setup_env.py"),
    Run("bash tests/run_faults.sh", COLLECTED),
)  # fmt: skip

ON_ONE_MACHINE = {
    "NNODES=16": "NNODES=1",
    "NODE_RANK=$RANK_OF_NODE": "NODE_RANK=0",
    "MASTER_ADDR=$FIRST_NODE": "MASTER_ADDR=127.0.0.1",
    "--nnodes 16": "--nnodes 1",
    "--node-rank $RANK_OF_NODE": "--node-rank 0",
    "--master-addr $FIRST_NODE": "--master-addr 127.0.0.1",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--nproc 8": "--nproc 2",
    "--tensor-model-parallel-size 8": "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 4": "--pipeline-model-parallel-size 1",
}
"""What the pages say for 16 nodes of 8 GPUs, and what two CPU processes have instead."""


def commands(page: str) -> list[Command]:
    """Return the commands of a page's blocks, in order."""
    text, found = (ROOT / page).read_text(), []
    blocks = re.findall(r"^```bash ?([^\n]*)\n(.*?)^```$", text, re.M | re.S)
    for mark, block in blocks:
        lines = block.replace("\\\n", " ").splitlines()
        texts = [re.sub(r"\s+#.*", "", " ".join(line.split())) for line in lines]
        found += [Command(page, text, mark) for text in texts if text and text[0] != "#"]
    return found


def inline_commands(page: str) -> list[Command]:
    """Return the commands within a page's lines."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    return [Command(page, span, "") for span in spans if _INLINE.match(span)]


def run_of(command: Command) -> Run | None:
    """Return the row of a command, if it has one."""
    fitting = [run for run in RUNS if command.text.startswith(run.start)]
    return max(fitting, key=lambda run: len(run.start), default=None)
