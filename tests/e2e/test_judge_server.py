"""A tiny judge behind a real vLLM server: its verdicts, and a run that learns from them.

The server is killed in the middle of the run and started again. Not exercised: a judge that thinks,
servers on other nodes, keys (tests/reward/test_judge.py).
"""

import json
import random
import subprocess
import sys
import time

import psutil
import pytest

from tests.e2e.started import kill_tree
from tests.e2e.test_run import ROOT, environment
from tests.workers import free_port
from vapo_megatron.reward.judge import Judge, Pairwise
from vapo_megatron.reward.verifier import Problem

TINY = ROOT / "examples/tiny"
sys.path.insert(0, str(TINY))

import make_judge  # noqa: E402
import task  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory that looks like the repository, with nothing in runs/."""
    directory = tmp_path_factory.mktemp("repository")
    for name in ("examples", "tools", "vapo_megatron"):
        (directory / name).symlink_to(ROOT / name)
    return directory


def until(is_so, seconds, said):
    """Wait for it; `said` is called for what to show if it does not come."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, said()
        time.sleep(0.2)


def asked(recipe, count):
    """[(response, problem, whether they agree)] about held-out problems."""
    rng = random.Random("asked")
    rows = []
    for _ in range(count):
        problem = task.draw_problem(rng, held_out=True)
        response = make_judge.draw_response(rng, recipe, problem, recipe.direct_share)
        answer = make_judge.draw_answer(rng, response)
        agrees = make_judge.agrees(response, answer, pairwise=recipe.pairwise)
        rows.append((response, Problem(problem.prompt, answer), agrees))
    return rows


@pytest.mark.parametrize("kind", [Judge, Pairwise])
def test_verdicts_on_held_out_questions(kind, tmp_path):
    recipe = make_judge.Recipe() if kind is Judge else make_judge.pairwise_recipe(0)
    make_judge.make(tmp_path / "judge", recipe)
    port, log = free_port(), tmp_path / "log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tmp_path / "judge",
        "--served-model-name", "judge", "--host", "127.0.0.1", "--port", port, "--dtype", "float32",
        "--max-model-len", "512", "--enforce-eager",
    ]  # fmt: skip
    more = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as file:
        server = subprocess.Popen(
            list(map(str, command)), env={**environment(), **more}, stdout=file, stderr=file
        )
    rows = asked(recipe, 400)
    try:
        for chat in (True, False):
            # The first request waits for the server.
            verifier = kind(base_url=f"http://127.0.0.1:{port}/v1", model="judge", chat=chat)
            found = list(verifier.score([row[0] for row in rows], [row[1] for row in rows]))
            verifier.close()
            assert {verdict.status for verdict in found} == {"correct", "wrong"}, found[0]
            right = sum(verdict.is_correct == row[2] for verdict, row in zip(found, rows))
            print(f"{kind.__name__}, chat={chat}: {right} of {len(rows)} verdicts are right")
            assert right >= (0.95 if kind is Judge else 0.9) * len(rows)
    finally:
        kill_tree(server)


def test_a_run_learns_from_the_judge_and_goes_on_when_it_is_back(place, tmp_path):
    out, port, log = place / "runs/tiny/seed_0", free_port(), tmp_path / "log"
    command = ["bash", "examples/run_vapo_tiny_judge.sh", "--port", str(port)]
    with log.open("w") as file:
        run = subprocess.Popen(command, cwd=place, env=environment(), stdout=file, stderr=file)
    metrics, again = out / "judged/metrics.jsonl", None

    def said():
        return log.read_text()[-5000:]

    def rows():
        return metrics.read_text().splitlines() if metrics.exists() else []

    def steps_or_end(count):
        return len(rows()) > count or run.poll() is not None

    try:
        until(lambda: steps_or_end(18), 1800, said)
        assert run.poll() is None, said()
        (server,) = [
            p for p in psutil.Process(run.pid).children() if "vllm.entrypoints" in str(p.cmdline())
        ]
        command, variables = server.cmdline(), server.environ()
        kill_tree(server)
        before = len(rows())
        time.sleep(30)
        # The step whose last verdicts were there already ends.
        assert len(rows()) <= before + 1 and run.poll() is None, said()
        with (tmp_path / "again").open("w") as file:
            again = subprocess.Popen(command, cwd=place, env=variables, stdout=file, stderr=file)
        until(lambda: run.poll() is not None, 1800, said)
    finally:
        for process in (run, again):
            if process is not None and process.poll() is None:
                kill_tree(process)
    assert run.returncode == 0, said()
    first, *steps = map(json.loads, rows())
    assert [row["step"] for row in steps] == list(range(1, 45))
    assert {row["reward/failed_fraction"] for row in steps} == {0.0}
    assert max(row["time/step_seconds"] for row in steps) > 30
    accuracy = first["evaluation/avg@8"], steps[-1]["evaluation/avg@8"]
    print(f"avg@8 by the true verifier: {accuracy[0]:.3f} before, {accuracy[1]:.3f} after")
    assert accuracy[0] < 0.3 and accuracy[1] >= 0.85
