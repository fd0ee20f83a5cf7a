"""Dumped rollouts: exact, bounded, refused when damaged or unfit; training from them without vLLM.

That a replay repeats the run that dumped it bit by bit is in tests/e2e/test_run.py, with the real
sampler. Not exercised: file systems that lose writes.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.numpy import save_file

from tests.dumped import GROUP_SIZE, MODEL, NUM_RESPONSES, config, dump, rollouts, write
from tests.run.checkpoint.test_writer import limited
from tests.weights.tiny_hf import write_tiny_hf
from tests.whole_run import trainer
from vapo_megatron.cli.checks.paths import require_paths
from vapo_megatron.data.rollout import Episode, Turn
from vapo_megatron.errors import ConfigError, DataError, UserError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel import groups
from vapo_megatron.reward.own_metrics import own_metrics, sums_of
from vapo_megatron.rollout.dump import read_file, read_headers, write_step
from vapo_megatron.rollout.replay import Replay, check_dump
from vapo_megatron.rollout.source import StepRequest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return write_tiny_hf(tmp_path_factory.mktemp("replay_model"), **MODEL)


@pytest.fixture
def root(tmp_path, workers):
    """Steps 1 and 2, each of two ranks."""
    workers.run(2, dump, tmp_path / "run/replay", [1, 2], 2)
    return tmp_path / "run/replay"


def test_what_is_read_is_what_was_written(root):
    for step in (1, 2):
        files = read_headers(root, step)
        assert [path.name for path, _ in files] == [
            "rank_00000.safetensors",
            "rank_00001.safetensors",
        ]
        assert [s for path, _ in files for s in read_file(path)] == rollouts(step)
    # 8 bytes a response token; a tiny file is mostly its header and lengths.
    assert files[0][0].stat().st_size < 4000


def with_own_prompts(step):
    """The responses, with prompts of two groups' own for the critic."""
    return [
        dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, prompt=own))
        for item in rollouts(step)
        for prompt in [item.rollout.prompt]
        for own in [dataclasses.replace(prompt, critic_token_ids=OWN.get(prompt.index))]
    ]


def with_turns(step):
    """Every second response has two turns, a reward on the way and an observation at its begin."""
    found = []
    for item in rollouts(step):
        r = item.rollout
        half = len(r.token_ids) // 2
        if r.position % 2 and half:
            inserted = ((0, array("i", [7])), (half, array("i", [r.position, 59])))
            turns = (Turn(half, -0.25), Turn(len(r.token_ids), 0.0))
            episode = Episode("environment.max_turns", r.position == 3, failed_calls=r.position)
            r = dataclasses.replace(r, inserted=inserted, turns=turns, episode=episode)
            item = dataclasses.replace(item, rollout=r, token_rewards=((half - 1, -0.25),))
        found.append(item)
    return found


def test_turns_are_dumped(tmp_path, workers):
    workers.run(1, write, tmp_path, with_turns(1))
    ((path, header),) = read_headers(tmp_path, 1)
    assert read_file(path) == with_turns(1) != rollouts(1)
    assert header.longest_sequence == max(len(s.rollout.sequence) for s in with_turns(1))
    assert header.largest_token_id == 59


def with_routes(step, width=6, without=2):
    """Every response but one has the routes of all tokens but its last."""
    found = []
    for item in with_turns(step):
        r = item.rollout
        rows = len(r.sequence) - 1
        routes = (np.arange(rows * width) * (r.position + 1) % 251).astype(np.uint8)
        routes = None if r.position == without else routes.reshape(rows, width)
        found.append(dataclasses.replace(item, rollout=dataclasses.replace(r, routes=routes)))
    return found


def test_routes_are_dumped(tmp_path, workers):
    workers.run(1, write, tmp_path, with_routes(1))
    ((path, _),) = read_headers(tmp_path, 1)
    read = read_file(path)
    assert read == with_turns(1)
    for item, written in zip(read, with_routes(1), strict=True):
        routes, expected = item.rollout.routes, written.rollout.routes
        if expected is None:
            assert routes is None
        else:
            assert routes.dtype == np.uint8 and np.array_equal(routes, expected)


def read_with_routes(hf, root, width):
    """The number of responses of a replay that needs so many routes of each token."""
    ranks = groups.initialize(config(hf).parallel)
    source = Replay(root, ranks, "math", routes_per_token=width)
    try:
        return len(source.rollouts(StepRequest(0, 0, contextlib.nullcontext))[0])
    except DataError as error:
        return str(error)


def test_a_dump_with_other_routes_is_refused(tmp_path, workers, hf):
    workers.run(1, write, tmp_path / "with", with_routes(1, without=None))
    assert workers.run(1, read_with_routes, hf, tmp_path / "with", 6) == [NUM_RESPONSES]
    (error,) = workers.run(1, read_with_routes, hf, tmp_path / "with", 8)
    assert "has 6 experts of a token that vLLM chose" in error and "this model has 8" in error
    workers.run(1, write, tmp_path / "without", with_turns(1))
    (error,) = workers.run(1, read_with_routes, hf, tmp_path / "without", 6)
    assert "has 0 experts" in error and "set algorithm.router_replay to r2 or off" in error


OWN = {0: (59, 58, 57, 56, 55, 54), 2: (3,)}


def test_the_critics_prompts_are_dumped(tmp_path, workers):
    workers.run(1, write, tmp_path, with_own_prompts(1))
    ((path, header),) = read_headers(tmp_path, 1)
    assert read_file(path) == with_own_prompts(1) != rollouts(1)
    assert header.largest_token_id == 59
    assert header.longest_sequence == max(
        max(len(r.prompt.token_ids), len(OWN.get(r.prompt.index, ()))) + len(r.token_ids)
        for r in (item.rollout for item in rollouts(1))
    )


def in_parts(tmp):
    """Write responses of which two have been sampled by several versions, and two measured."""
    scored = rollouts()
    for i, segments in ((2, ((0, 1), (3, 2))), (7, ((1, 2), (2, 3), (5, 1)))):
        rollout = dataclasses.replace(scored[i].rollout, segments=segments)
        scored[i] = dataclasses.replace(scored[i], rollout=rollout)
    for i, metrics in ((2, {"steps": 3, "ok": True}), (5, {"steps": 0.25})):
        scored[i] = dataclasses.replace(scored[i], metrics=metrics)
    write(tmp, scored)
    return scored, read_file(tmp / "step_000001/rank_00000.safetensors")


def test_the_versions_of_a_response_are_dumped(tmp_path, workers):
    ((written, read),) = workers.run(1, in_parts, tmp_path)
    assert [s.rollout.segments for s in read] == [s.rollout.segments for s in written]
    assert [s.rollout.segments for s in read][2] == ((0, 1), (3, 2))
    assert read == written and read[5].metrics == {"steps": 0.25}
    found = own_metrics([sums_of(read[:4]), sums_of(read[4:])])
    assert found == {"reward/own/ok": 1.0, "reward/own/steps": 1.625}


def test_ranks_without_responses_write_nothing(tmp_path, workers):
    workers.run(2, dump, tmp_path, [1], 1)
    (file,) = read_headers(tmp_path, 1)
    assert read_file(file[0]) == rollouts(1)


def test_only_the_latest_steps_stay(tmp_path, workers):
    half = tmp_path / "step_000002.partial"
    half.mkdir()
    assert workers.run(1, dump, tmp_path, [1, 2, 3, 4], 1, 2) == [[3, 4]]
    assert not half.exists()
    # Resumed after step 1: what lies ahead is another run's.
    assert workers.run(1, dump, tmp_path, [2], 1, 2) == [[2]]


def _dump_on_a_full_disk(root):
    with limited(100), pytest.raises(UserError) as error:
        dump(root, [1], 1)
    return str(error.value)


def test_a_full_disk_is_told_with_the_file(tmp_path, workers):
    (words,) = workers.run(1, _dump_on_a_full_disk, tmp_path)
    file = tmp_path / "step_000001.partial/rank_00000.safetensors"
    assert words.startswith(f"{file} cannot be written: File too large; ")


def damage(root, how):
    file = root / "step_000002/rank_00001.safetensors"
    data = bytearray(file.read_bytes())
    if how == "cut":
        file.write_bytes(data[:-7])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "flipped":
        data[-3] ^= 4
        file.write_bytes(data)
    elif how == "foreign":
        shutil.copy(root.parent / "other.safetensors", file)
    elif how == "another step's":
        shutil.copy(root / "step_000001" / file.name, file)
    elif how == "missing":
        file.unlink()


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "foreign", "another step's", "missing"])
def test_a_damaged_dump_is_named(root, how):
    save_file({}, root.parent / "other.safetensors", metadata={"format": "pt"})
    damage(root, how)
    where = "step_000002" if how == "missing" else "rank_00001.safetensors"
    with pytest.raises(DataError, match=where):
        for path, _ in read_headers(root, 2):
            read_file(path)


def _replay(hf, root, sections, step):
    """What a user is told, or the positions that this rank reads; a worker's function."""
    replay = Replay(root, groups.initialize(config(hf, **sections).parallel), "math")
    try:
        scored, metrics = replay.rollouts(StepRequest(step, 0, contextlib.nullcontext))
        assert metrics == {}, "nothing is sampled"
    except DataError as error:
        return str(error)
    return [s.rollout.position for s in scored]


def test_ranks_read_consecutive_files(root, hf, workers):
    """Groups stay together: the first rank writes some of them for people."""
    two = {"parallel": {"world_size": 2}}
    assert workers.run(1, _replay, hf, root, {}, 0) == [list(range(16))]
    assert workers.run(2, _replay, hf, root, two, 0) == [list(range(8)), list(range(8, 16))]


def _plan(hf, root, sections):
    """[mini-batch][response] positions that this rank trains on in step 1, and its metrics."""
    with trainer(config(hf, **sections), root) as made:
        return _first_step(made)


def _first_step(trainer):
    assert trainer.reference is None, "kl_coef 0 needs none"
    scored, _ = trainer.source.rollouts(StepRequest(0, 0, trainer.phase))
    _, batch, plan = trainer._distribute(scored, 0)
    rank = trainer.ranks.dp_rank
    positions = [sum(mini_batch.ranks[rank], []) for mini_batch in plan.mini_batches]
    assert batch.positions.tolist() == sum(positions, [])
    metrics = trainer.train_step(0)
    with trainer.phase("generation") as show:
        show(3, 8, "round 2")
    phase = trainer.output._progress.bars.tasks[1]
    assert (phase.description, phase.fields["note"]) == ("generation round 2", "3 / 8")
    return positions, metrics


def test_any_number_of_ranks_makes_the_same_step(root, hf, workers):
    ((plan, metrics),) = workers.run(1, _plan, hf, root.parent, {})
    assert [len(mini) for mini in plan] == [8, 8]
    two = {"parallel": {"world_size": 2}}
    (first, same), (second, _) = workers.run(2, _plan, hf, root.parent, two)
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == list(map(sorted, plan))
    assert set(same) == set(metrics)
    assert same == pytest.approx({name: metrics[name] for name in same}, rel=1e-5, abs=1e-7)


def _of_dynamic_sampling(root, hf):
    """What two ranks that kept groups from anywhere in the step dump, as they read it again."""
    mine = {0: (1, 3), 1: (0, 2)}[dist.get_rank()]
    kept = [s for s in rollouts() if s.rollout.position // GROUP_SIZE in mine]
    write(root, kept)
    return _replay(hf, root, {"parallel": {"world_size": 2}}, 0)


def test_responses_are_read_in_order_wherever_they_were_kept(hf, workers, tmp_path):
    groups = [list(range(first, first + GROUP_SIZE)) for first in range(0, 16, GROUP_SIZE)]
    even, odd = groups[0] + groups[2], groups[1] + groups[3]
    assert workers.run(2, _of_dynamic_sampling, tmp_path, hf) == [even, odd]
    assert workers.run(1, _replay, hf, tmp_path, {}, 0) == [sum(groups, [])]


def _dump_unequal(root):
    """Responses of which the first two groups are of 3 and 5."""
    moved = {3: (1, 0), **{p: (1, p - 3) for p in range(4, 8)}}
    scored = rollouts()
    for position, (of, sample) in moved.items():
        prompt = scored[of * GROUP_SIZE].rollout.prompt
        rollout = dataclasses.replace(scored[position].rollout, prompt=prompt, sample=sample)
        scored[position] = dataclasses.replace(scored[position], rollout=rollout)
    write_step(root, 1, scored, num_responses=NUM_RESPONSES, group_size=0, keep_last=1)
    return scored


def test_groups_of_different_sizes_are_read_as_they_were(hf, workers, tmp_path):
    (scored,) = workers.run(1, _dump_unequal, tmp_path)
    ((path, header),) = read_headers(tmp_path, 1)
    assert header.group_size == 0 and read_file(path) == scored
    assert [s.rollout.first for s in scored[:9]] == [0] * 3 + [3] * 5 + [8]
    settings = config(hf)
    check_dump(tmp_path, settings.algorithm, settings.rollout, read_model_shape(hf), range(1))


@pytest.mark.parametrize(
    "sections,steps,words",
    [
        ({}, range(3), ("has steps 1, 2", "needs step 3", "algorithm.policy_steps")),
        (
            {"algorithm": {"responses_per_step": 32}},
            range(1),
            ("algorithm.responses_per_step=32", "set algorithm.responses_per_step=16"),
        ),
        ({"algorithm": {"group_size": 8}}, range(1), ("set algorithm.group_size=4",)),
        ({"rollout": {"max_response_tokens": 8}}, range(1), ("rank_0000", "max_response_tokens")),
        ({"rollout": {"max_response_tokens": 600}}, range(1), ("max_position_embeddings=512",)),
        ({"model": {"hf_path": "small"}}, range(1), ("token id 58", "vocabulary of 56")),
    ],
    ids=["steps", "responses", "groups", "length", "positions", "vocabulary"],
)
def test_a_dump_that_does_not_fit_is_refused(root, hf, tmp_path, sections, steps, words):
    fitting = config(hf)
    check_dump(root.parent, fitting.algorithm, fitting.rollout, read_model_shape(hf), range(2))
    if "model" in sections:
        small = write_tiny_hf(tmp_path / "small", **{**MODEL, "vocab": 56})
        sections = {"model": {"hf_path": str(small)}}
    settings = config(hf, **sections)
    with pytest.raises((ConfigError, DataError)) as error:
        shape = read_model_shape(settings.model.hf_path)
        check_dump(root, settings.algorithm, settings.rollout, shape, steps)
    for word in words:
        assert word in str(error.value)


def test_a_file_that_one_rank_cannot_read_stops_all(root, hf, workers):
    damage(root, "flipped")
    two = {"parallel": {"world_size": 2}}
    first, second = workers.run(2, _replay, hf, root, two, 1)
    assert first == second
    assert "rank_00001.safetensors" in first and "checksum" in first


def train(*arguments):
    """The command in one process; its output says whether vLLM was loaded."""
    code = (
        "import sys; from vapo_megatron.cli.train import main\n"
        "if __name__ == '__main__':\n"
        "    code = main(sys.argv[1:])\n"
        "    print('loaded:', [m for m in ('vllm', 'math_verify') if m in sys.modules])\n"
        "    sys.exit(code)"
    )
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**clean, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_the_command_trains_without_vllm_and_resumes(root, hf, tmp_path):
    file, run_dir = tmp_path / "config.yaml", tmp_path / "again"
    file.write_text(config(hf, logging={"run_dir": str(run_dir)}).to_yaml())
    command = ("--config", file, "--replay", root.parent)
    done = train(*command, "algorithm.policy_steps=1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loaded: []" in done.stdout
    assert "nothing is sampled, published or evaluated" in done.stdout
    done = train(*command)
    assert "resumed" in done.stdout and "step 2/2" in done.stdout, done.stderr[-3000:]
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    for name in ("hf_export/model.safetensors", "rollouts/step_000002.jsonl", "report.html"):
        assert (run_dir / name).stat().st_size > 0, name


@pytest.mark.parametrize("which", ["", "replay", "skipped"])
def test_a_replay_does_not_write_over_its_dump(root, hf, tmp_path, which):
    own = config(hf, logging={"run_dir": str(root.parent)})
    (root.parent / "skipped").mkdir()
    with pytest.raises(ConfigError, match="written over"):
        require_paths(own, root.parent / which)
    require_paths(config(hf, logging={"run_dir": str(tmp_path)}), root.parent / which)


def test_paths_that_are_not_there():
    with pytest.raises(ConfigError, match="data.train_path is required"):
        require_paths(config(ROOT), None)
    with pytest.raises(ConfigError, match="--replay=/nowhere"):
        require_paths(config(ROOT), Path("/nowhere"))
