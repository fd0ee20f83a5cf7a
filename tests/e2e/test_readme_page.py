"""The README's page from nothing to 32B, followed command by command with a tiny model.

    bash tests/run.sh tests/e2e/test_readme_page.py -m slow

The commands are read from the README, and run in a directory that looks like the repository, with a
tiny model under the 32B model's name and files in the published shapes under the data's. What each
is given on top of what the README says stands in SMALLER. Does not exercise: installing, downloads,
Slurm (tests/examples/test_slurm.py), GPUs.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_run import SMALL, TINY, environment, rows
from tests.workers import free_port

ROOT = Path(__file__).resolve().parents[2]
TITLE = "## From nothing to 32B"

# The tiny run's sizes over the 32B recipe: two processes for 128.
TRAINING = [
    "--config", TINY, *SMALL, "model.hf_path=models/Qwen2.5-32B", "parallel.world_size=2",
    "parallel.pipeline_model_parallel_size=1", "parallel.use_distributed_optimizer=true",
    "rollout.tensor_model_parallel_size=1",
    "data.train_path=data/dapo_math_17k.parquet", "evaluation.path=data/aime_2024.parquet",
    "reward.overlong_buffer_tokens=16", "rollout.max_prompt_tokens=256", "checkpoint.every_steps=1",
    "logging.run_dir=runs/qwen2.5_32b",
]  # fmt: skip
# What a command begins with: what it is given on top. None: it needs a network, a cluster, a GPU,
# or does not end.
SMALLER = {
    "docker ": None,
    "hf download ": None,
    "sbatch ": None,
    "tensorboard ": None,
    "tail -f ": None,
    "python tools/gpu_smoke.py": None,
    "python tools/convert_hf_to_megatron.py": ["--make-vocab-size-divisible-by=8"],
    "python tools/convert_megatron_to_hf.py": [],
    "python tools/prepare_prompts.py": ["--max-prompt-tokens=256"],
    "python tools/plan.py --model": [],
    "bash examples/run_vapo_qwen32b.sh --dry-run": TRAINING,
    "NNODES=16": TRAINING,
    "torchrun --nnodes": TRAINING,
    "python tools/report.py": [],
    "torchrun --nproc-per-node 8 tools/evaluate.py": [
        "--samples=2", "rollout.max_response_tokens=64", "rollout.kv_cache_bytes=67108864",
        "rollout.max_prompt_tokens=256", "rollout.tensor_model_parallel_size=1",
    ],
}  # fmt: skip
# What the README says for 16 nodes of 8 GPUs, and one CPU has instead.
ON_ONE_MACHINE = {
    "NNODES=16": "NNODES=1",
    "NODE_RANK=$RANK_OF_NODE": "NODE_RANK=0",
    "MASTER_ADDR=$FIRST_NODE": "MASTER_ADDR=127.0.0.1",
    "--nnodes 16": "--nnodes 1",
    "--node-rank $RANK_OF_NODE": "--node-rank 0",
    "--master-addr $FIRST_NODE": "--master-addr 127.0.0.1",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--tensor-model-parallel-size 8": "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 4": "--pipeline-model-parallel-size 1",
}


def page() -> str:
    text = (ROOT / "README.md").read_text()
    return text.split(TITLE)[1].split("\n## ")[0]


def commands() -> list[str]:
    """Every command of the page, in order, with continued lines joined and comments gone."""
    blocks = re.findall(r"```bash\n(.*?)```", page(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    stripped = [re.sub(r"\s+#.*", "", " ".join(line.split())) for line in lines]
    return [line for line in stripped if line and not line.startswith("#")]


def addition(command: str) -> list[str] | None:
    """Return what a command of the page is given on top."""
    (found,) = [key for key in SMALLER if command.startswith(key)]
    return SMALLER[found]


def test_every_command_of_the_page_has_its_place_here():
    found = commands()
    assert len(found) >= 12
    used = [key for command in found for key in SMALLER if command.startswith(key)]
    assert len(used) == len(found), "each command fits one row of SMALLER"
    assert set(used) == set(SMALLER), "each row of SMALLER fits a command"


@pytest.fixture
def place(tmp_path):
    """A directory like the repository; a tiny model and data under the names of the page."""
    for name in ("examples", "tools", "vapo_megatron"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("models", "downloads/data", "data"):
        (tmp_path / name).mkdir(parents=True)
    make = (
        "import sys; sys.path.insert(0, 'examples/tiny'); import make_base_model as m;"
        "m.make(__import__('pathlib').Path('models/Qwen2.5-32B'), m.Recipe(iterations=30))"
    )
    execute(tmp_path, f"{sys.executable} -c {shlex.quote(make)}")
    sizes = "--train 64 --test 8 --seed 0 --out data/tiny"
    execute(tmp_path, f"{sys.executable} examples/tiny/task.py {sizes}")

    def problems(name):
        lines = (tmp_path / f"data/tiny/{name}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def write(name, chosen):
        """As in verl's data sets: chat messages, the answer in a struct, problems repeated."""
        rows = [
            {
                "data_source": "math_dapo",
                "prompt": [{"role": "user", "content": p["prompt"]}],
                "ability": "MATH",
                "reward_model": {"ground_truth": str(p["answer"]), "style": "rule"},
            }
            for p in chosen * 2
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"downloads/data/{name}.parquet")

    write("dapo-math-17k", problems("train"))
    write("aime-2024", problems("test"))
    return tmp_path


def shell(place: Path, command: str, **more: str) -> dict:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    port = {"MASTER_PORT": str(free_port()), "NPROC_PER_NODE": "2"}
    return {
        "args": ["bash", "-c", command], "cwd": place, "text": True,
        "env": {**environment(), **port, "PATH": path, **more},
        "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT,
    }  # fmt: skip


def execute(place: Path, command: str) -> str:
    done = subprocess.run(**shell(place, command), timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}"
    return done.stdout


def tiny(command: str) -> str:
    """Return a command of the page as it is run here."""
    added = [shlex.quote(str(a)) for a in addition(command) or []]
    for big, small in ON_ONE_MACHINE.items():
        command = command.replace(big, small)
    return " ".join([command, *added])


def kill_after_a_checkpoint(place: Path, command: str, run_dir: Path) -> None:
    """Start a run, and kill all of its processes once there is something to go on from."""
    job = subprocess.Popen(**shell(place, command), start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while not (run_dir / "checkpoints/latest").exists():
            assert job.poll() is None and time.monotonic() < deadline, job.communicate()[0][-3000:]
            time.sleep(0.05)
    finally:
        if job.poll() is None:
            # torchrun's processes have sessions of their own, and would go on without it.
            for process in [*psutil.Process(job.pid).children(recursive=True), job]:
                process.kill()
            job.communicate()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_page_leads_from_nothing_to_an_exported_model(place):
    run_dir = place / "runs/qwen2.5_32b"
    shown = {}
    for command in commands():
        if addition(command) is None:
            continue
        if command.startswith("NNODES=16"):
            kill_after_a_checkpoint(place, tiny(command), run_dir)
        shown[command] = execute(place, tiny(command))

    def printed(start: str) -> str:
        (text,) = [text for command, text in shown.items() if command.startswith(start)]
        return text

    # 64 and 8 problems, each twice; a few of them may be the same.
    assert pq.read_table(place / "data/dapo_math_17k.parquet").num_rows in range(32, 65)
    assert pq.read_table(place / "data/aime_2024.parquet").num_rows in range(4, 9)
    assert "world_size: 2\n" in printed("bash examples/run_vapo_qwen32b.sh --dry-run")
    assert "resumed" in printed("NNODES=16")
    assert [row["step"] for row in rows(run_dir)] == [0, 1, 2, 3, 4]
    assert "resumed" in printed("torchrun --nnodes") and "step 4/4" not in printed(
        "torchrun --nnodes"
    )
    assert (run_dir / "report.html").exists()
    assert "avg@2" in printed("torchrun --nproc-per-node 8 tools/evaluate.py")
    exported, own = (
        load_file(path / "model.safetensors")
        for path in (place / "exported/latest", run_dir / "hf_export")
    )
    assert exported.keys() == own.keys()
    assert all(torch.equal(exported[name], own[name]) for name in own)
