"""A run that is killed again and again ends, bit by bit, as one that never was.

Every process of it is sent SIGKILL, at moments that moments.py draws from a seed; whoever starts it
again does nothing else. Two tensor-parallel processes, vLLM, value pretraining, dynamic sampling,
warm-up of both learning rates, a data set of less than the run's prompts. Not exercised: the loss
of what the operating system had not written yet (a machine that loses its power), several nodes.
"""

import hashlib
import io
import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.e2e.moments import (
    CHECKPOINT_EVERY,
    EVALUATION_EVERY,
    NUM_STEPS,
    POLICY_STEPS,
    VALUE_STEPS,
    draw,
)
from tests.e2e.started import Started, updates
from tests.e2e.test_run import DYNAMIC, SMALL, TINY, base_model, run, tiny_problems, torchrun
from tests.whole_run import measured
from vapo_megatron.parallel.checkpoint_metadata import read_metadata, tensors_of
from vapo_megatron.run.checkpoint.files import STATE, candidates, find_problems, step_directories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MOMENTS = draw(seed=0)
NUM_PROBLEMS = 13
"""Of a step's 4 prompts each, without what dynamic sampling takes: two epochs and a part."""
SETTINGS = [
    *SMALL, *DYNAMIC,
    f"algorithm.value_pretraining_steps={VALUE_STEPS}", f"algorithm.policy_steps={POLICY_STEPS}",
    # The critic makes 22 updates, the actor 18: both warm up in more than the run's first half.
    "optimizer.critic_warmup_updates=13", "optimizer.actor_warmup_updates=11",
    f"checkpoint.every_steps={CHECKPOINT_EVERY}", "checkpoint.keep_last=1",
    f"evaluation.every_steps={EVALUATION_EVERY}",
]  # fmt: skip


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """Where both runs, the model and the problems are."""
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def given(room):
    """A model that is sometimes right, and problems, as overrides."""
    inputs = [base_model(room / "base", 100), *tiny_problems(room, NUM_PROBLEMS, 8)]
    return ["--config", TINY, *SETTINGS, *inputs]


@pytest.fixture(scope="module")
def kills():
    """What the tests so far have measured: each fault, with the checkpoints that it left."""
    return []


def tensors_sha256(directory):
    """Of a role's parameters, and of its optimizer's state."""
    metadata = read_metadata(directory)
    digests = {"model": hashlib.sha256(), "optimizer": hashlib.sha256()}
    for key, tensor in sorted(tensors_of(metadata).items()):
        digest = digests["optimizer" if key.startswith("optimizer.") else "model"]
        for chunk in sorted(tensor.chunks, key=lambda chunk: tuple(chunk.offsets)):
            place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            stored = (directory / place.relative_path).read_bytes()[place.offset :][: place.length]
            data = torch.load(io.BytesIO(stored), weights_only=True).contiguous()
            digest.update(f"{key} {data.dtype} {chunk.offsets} {chunk.sizes}".encode())
            digest.update(data.view(-1).view(torch.uint8).numpy())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def check_the_start(log, run_dir, kills):
    """See which checkpoint a run has gone on from after the last kills: what was saved is there."""
    said = log.read_text().splitlines()
    resumed = [line.split(" after step ")[1] for line in said if f"resumed {run_dir}" in line]
    step = int(resumed[0].split()[0]) if resumed else 0
    for fault, saved in kills:
        if fault.lost_updates is None:
            fault.lost_updates = max(saved.values(), default=0) - (saved[step] if step else 0)
            assert fault.lost_updates == 0, f"{fault}: it has gone on from {step} of {saved}"


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.kind)
def test_killed(moment, given, room, kills, injected):
    run_dir, log, records = room / "cut", room / f"log_{len(kills)}", room / "records.jsonl"
    program = ["tests/e2e/killed_run.py", json.dumps(moment._asdict()), records]
    started = Started(torchrun(*program, *given, f"logging.run_dir={run_dir}"), log, run_dir)
    code = started.end()
    lines = records.read_text().splitlines() if records.exists() else []
    assert code == -9 and len(lines) == len(kills) + 1, f"it has not been met: {started.said()}"
    met = json.loads(lines[-1])
    where = f"{moment.kind}: {met['phase']} of step {met['step']}, rank {met['rank']}"
    fault = injected("all processes killed", where)
    if met["phase"] != "start":  # In which it does not say yet where it goes on.
        check_the_start(log, run_dir, kills)
    left = candidates(run_dir / "checkpoints")
    assert not left or find_problems(left[0], None) == []
    kills.append((fault, {step: updates(d) for step, d in saved(run_dir).items()}))


def saved(run_dir):
    """The checkpoints that a run may go on from, by step."""
    allowed = candidates(run_dir / "checkpoints")
    found = step_directories(run_dir / "checkpoints")
    return {step: directory for step, directory in found.items() if directory in allowed}


def test_it_ends_as_if_it_had_never_been_killed(given, room, kills):
    whole, cut, log = room / "whole", room / "cut", room / "log_last"
    run(torchrun("-m", "vapo_megatron.train", *given, f"logging.run_dir={whole}"))
    command = torchrun("-m", "vapo_megatron.train", *given, f"logging.run_dir={cut}")
    started = Started(command, log, cut)
    assert started.end() == 0, started.said()
    check_the_start(log, cut, kills)

    assert [row["step"] for row in measured(cut)] == list(range(NUM_STEPS + 1))
    assert measured(cut) == measured(whole)
    last = f"checkpoints/step_{NUM_STEPS:06d}"
    assert (cut / "checkpoints/latest").read_text() == Path(last).name
    for role in ("actor", "critic"):
        assert tensors_sha256(cut / last / role) == tensors_sha256(whole / last / role), role
    assert updates(cut / last) == updates(whole / last)
    # Beside the tensors: where the data stands, what an optimizer has of numbers.
    assert state_of(cut / last, cut) == state_of(whole / last, whole)
    names = [*names_of(whole, f"{last}/**/*.pt"), *names_of(whole, "rollouts/*")]
    names += ["problems.jsonl", "held_out.jsonl", "hf_export/model.safetensors"]
    assert len(names) == 2 + NUM_STEPS + 3
    assert names_of(cut, "rollouts/*") == names_of(whole, "rollouts/*")
    for name in names:
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
    for fault, _ in kills:
        fault.survived = True


def state_of(checkpoint, run_dir):
    """All but where the run is."""
    state = json.loads((checkpoint / STATE).read_text())
    assert state["run"]["config"]["logging"].pop("run_dir") == str(run_dir)
    return state


def names_of(run_dir, pattern):
    """Files, as a run directory names them."""
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.glob(pattern))


def test_the_run_shows_what_it_is_for(room):
    """That is, no comparison above is one of things that never change."""
    whole, last = room / "whole", room / f"whole/checkpoints/step_{NUM_STEPS:06d}"
    state = json.loads((last / STATE).read_text())
    # Two updates in each step; the actor has none in value pretraining.
    assert state["num_updates"] == {"actor": 2 * POLICY_STEPS, "critic": 2 * NUM_STEPS}
    assert state["run"]["data"]["epoch"] >= 2
    written = measured(whole)
    assert max(row.get("rollout/sampling_rounds", 0) for row in written) > 1
    for role in ("actor", "critic"):
        rates = [r[f"{role}/learning_rate"] for r in written if f"{role}/learning_rate" in r]
        assert rates[0] < rates[1] and rates[-2] == rates[-1] == max(rates)
    digests = [tensors_sha256(last / role) for role in ("actor", "critic")]
    assert len({sum for of_role in digests for sum in of_role.values()}) == 4
