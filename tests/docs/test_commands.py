"""The documentation's commands, page by page and in order, with a tiny model for a large one.

    bash tests/run.sh tests/docs/test_commands.py -m slow

A page runs in a directory that looks like the repository. It has a base model under the names that
the pages use, data in the published shapes, and a finished run. What a command is given on top, and
what it must print, stands in commands.py. Not exercised: installing, downloads, Slurm
(tests/examples/test_slurm.py), GPUs.
"""

import json
import os
import re
import shlex
import shutil
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

from tests import jsonl
from tests.docs.commands import ON_ONE_MACHINE, PAGES, ROOT, TINY_RUN, commands, run_of
from tests.e2e.test_run import environment
from tests.whole_run import measured
from tests.workers import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

VAPO = f"""#!/bin/sh
exec {shlex.quote(sys.executable)} -m vapo_megatron "$@"
"""
# A barely trained model that passes for the one that examples/tiny makes in minutes.
MAKE_BASE = """
import json, sys; sys.path.insert(0, 'examples/tiny')
import make_base_model, make_tokenizer, making, skill, task
from pathlib import Path
out, seed = Path(sys.argv[1]), int(sys.argv[2])
make_base_model.make(out, make_base_model.Recipe(iterations=30, seed=seed))
parts = [make_base_model, making, skill, task, make_tokenizer]
recipe = json.loads((out / 'recipe.json').read_text())
recipe['digest'] = making.digest(make_base_model.short_recipe(seed), parts)
(out / 'recipe.json').write_text(json.dumps(recipe))
"""


def steps(page):
    """The commands of a page that are run here."""
    chosen = [(command, run_of(command)) for command in commands(page) if not command.mark]
    # test_pages.py tells of a command without a row.
    return [(command, run) for command, run in chosen if run and not (run.by or run.is_quick)]


STORIES = [page for page in PAGES if steps(page) and page != "README.md"]


def shell(place: Path, command: str) -> dict:
    path = f"{place}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    port = {"MASTER_PORT": str(free_port()), "NPROC_PER_NODE": "2"}
    return {
        "args": ["bash", "-c", command], "cwd": place, "text": True,
        "env": {**environment(), **port, "PATH": path},
        "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT,
    }  # fmt: skip


def execute(place: Path, command: str, shows: str = "") -> str:
    done = subprocess.run(**shell(place, command), timeout=900)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}"
    assert shows in done.stdout, f"{command} does not print {shows!r}\n{done.stdout[-3000:]}"
    return done.stdout


def tiny(command: str, added: tuple[str, ...]) -> str:
    """Return a command of a page as it is run here."""
    for big, small in ON_ONE_MACHINE.items():
        command = command.replace(big, small)
    return " ".join([command, *map(shlex.quote, added)])


def published(place: Path, name: str, part: str) -> None:
    """Write problems as verl's data sets do: chat messages, answers in a struct, each twice."""
    lines = (place / f"runs/tiny/seed_0/data/{part}.jsonl").read_text().splitlines()
    table = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": problem["prompt"]}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(problem["answer"]), "style": "rule"},
        }
        for problem in map(json.loads, lines * 2)
    ]
    pq.write_table(pa.Table.from_pylist(table), place / f"downloads/data/{name}.parquet")


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """A directory like the repository after the tiny run, with the 32B run's names besides."""
    place = tmp_path_factory.mktemp("repository")
    kept = {".git", "runs", "build", "models", "data", "downloads", ".venv"}
    for entry in ROOT.iterdir():
        if entry.name not in kept and not entry.name.endswith((".egg-info", "_cache")):
            (place / entry.name).symlink_to(entry)
    for name in ("bin", "models", "data", "downloads/data"):
        (place / name).mkdir(parents=True)
    (place / "bin/vapo").write_text(VAPO)
    (place / "bin/vapo").chmod(0o755)
    # What the set-up script would have made; here it is told to use the tests' own interpreter.
    execute(place, f"{sys.executable} -m venv --without-pip .venv")
    for seed in (0, 3):
        out = f"runs/tiny/seed_{seed}/base"
        execute(place, f"{sys.executable} -c {shlex.quote(MAKE_BASE)} {out} {seed}")
    for name in ("Qwen2.5-32B", "Qwen2.5-0.5B"):
        shutil.copytree(place / "runs/tiny/seed_0/base", place / "models" / name)
    run = tiny("bash examples/run_vapo_tiny.sh", (*TINY_RUN, "logging.dump_steps=44"))
    execute(place, run, shows="done: runs/tiny/seed_0/vapo")
    sizes = "--train 64 --test 8 --seed 0 --out runs/tiny/seed_0/data"
    execute(place, f"{sys.executable} examples/tiny/task.py {sizes}")
    published(place, "dapo-math-17k", "train")
    published(place, "aime-2024", "test")
    shutil.copy(place / "runs/tiny/seed_0/data/train.jsonl", place / "problems.jsonl")
    # docs/reward.md's function, and problems with the column that it reads.
    page = (ROOT / "docs/reward.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)[0]
    (place / "near.py").write_text(code)
    problems = [json.loads(line) for line in (place / "problems.jsonl").open()]
    lines = [json.dumps({**problem, "tolerance": 1}) + "\n" for problem in problems]
    (place / "near.jsonl").write_text("".join(lines))
    solved = [{"prompt": p["prompt"], "response": f"Answer:{p['answer']}"} for p in problems]
    jsonl.write(place / "solutions.jsonl", solved)
    mbpp = {"prompt": "Add 1.", "code": "def f(x): return x + 1", "test_list": ["assert f(1) == 2"]}
    jsonl.write(place / "mbpp.jsonl", [mbpp])
    for name, part in (("dapo_math_17k", "train"), ("aime_2024", "test")):
        problems = pa.Table.from_pylist(
            [json.loads(x) for x in (place / f"runs/tiny/seed_0/data/{part}.jsonl").open()]
        )
        pq.write_table(problems, place / f"data/{name}.parquet")
    shutil.copytree(place / "runs/tiny/seed_0/vapo", place / "runs/qwen2.5_32b")
    return place


@pytest.fixture
def place(ready, tmp_path):
    """A copy of it."""
    return shutil.copytree(ready, tmp_path / "repository", symlinks=True)


def kill_after_a_checkpoint(place: Path, command: str, run_dir: Path) -> None:
    """Start a run, and kill all of its processes once there is something to resume from."""
    job = subprocess.Popen(**shell(place, command), start_new_session=True)
    try:
        deadline = time.monotonic() + 600
        while not (run_dir / "checkpoints/latest").exists():
            assert job.poll() is None and time.monotonic() < deadline, job.communicate()[0][-3000:]
            time.sleep(0.05)
    finally:
        if job.poll() is None:
            # torchrun's processes have sessions of their own, and would live on without it.
            for process in [*psutil.Process(job.pid).children(recursive=True), job]:
                process.kill()
            job.communicate()


@pytest.mark.parametrize("page", STORIES)
def test_a_page(place, page):
    if page == "docs/training.md":
        shutil.rmtree(place / "runs/qwen2.5_32b")
    for command, run in steps(page):
        execute(place, tiny(command.text, run.added), run.shows)


def test_the_readme_leads_from_nothing_to_an_exported_model(place):
    run_dir = place / "runs/qwen2.5_32b"
    shutil.rmtree(run_dir)
    (place / "data/dapo_math_17k.parquet").unlink()
    shown = {}
    for command, run in steps("README.md"):
        text = tiny(command.text, run.added)
        if command.text.startswith("NNODES=16"):
            kill_after_a_checkpoint(place, text, run_dir)
        shown[command.text.split()[0]] = execute(place, text, run.shows)
    # 64 problems, each twice; a few of them may be the same.
    assert pq.read_table(place / "data/dapo_math_17k.parquet").num_rows in range(32, 65)
    assert "resumed" in shown["NNODES=16"]
    assert [row["step"] for row in measured(run_dir)] == [0, 1, 2, 3, 4]
    assert (run_dir / "report.html").exists()
    exported, own = (
        load_file(path / "model.safetensors")
        for path in (place / "exported/latest", run_dir / "hf_export")
    )
    assert exported.keys() == own.keys()
    assert all(torch.equal(exported[name], own[name]) for name in own)
