"""A run that goes on from a checkpoint: its policy's versions, and random states that nobody reads.

Whole trainers in a real process; what samples is a stand-in that notes what it is told. vLLM, which
has a seed for each request, is in tests/rollout/vllm/test_engine.py.
"""

import itertools
import json
import os
import random
import shutil
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from tests.dumped import MODEL, config
from tests.sealed import seal
from tests.test_other_layouts import rows, source
from tests.weights.tiny_hf import write_tiny_hf
from tests.workers import free_port
from vapo_megatron.run.output import RunOutput

SAVED_AT, STEPS = 2, 4


def sampler(settings, place, told):
    """Draws responses by their prompts, and notes the versions that it is told."""
    drawn = source(settings, place)
    inner, held = drawn.rollouts, []

    def publish(chunks, version):
        held[:] = [version]
        told.append(("published", version))
        return {}

    def rollouts(step, version, phase, **more):
        scored, metrics = inner(step, version, phase, **more)
        assert {s.rollout.policy_version for s in scored} == {version} == set(held)
        told.append((f"step {step + 1}", version))
        return scored, metrics

    def evaluate(version, phase, has_time=None):
        assert held == [version]
        told.append(("evaluated", version))
        return {}, []

    drawn.holds = lambda version: held == [version]
    drawn.publish, drawn.rollouts, drawn.evaluate = publish, rollouts, evaluate
    return drawn


def fit(hf, run_dir, port, seeds):
    """Make the run's steps that are missing; every phase begins with other random states."""
    from vapo_megatron.training.loop import VapoTrainer

    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    settings = config(
        hf,
        algorithm={"value_pretraining_steps": 1, "policy_steps": STEPS - 1},
        logging={"run_dir": str(run_dir), "tensorboard": False, "progress": "off"},
        checkpoint={"every_steps": SAVED_AT, "hf_export": False},
        optimizer={"actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2},
        parallel={"recompute": "full"},
    )
    told, seeds, phase = [], itertools.count(seeds), VapoTrainer.phase

    def disturbed(trainer, name):
        seed = next(seeds)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        return phase(trainer, name)

    notes = []
    with (
        mock.patch.object(RunOutput, "note", lambda output, text: notes.append(text)),
        mock.patch.object(VapoTrainer, "_source", lambda t, *_: sampler(t.config, t.ranks, told)),
        mock.patch.object(VapoTrainer, "phase", disturbed),
        VapoTrainer(settings) as trainer,
    ):
        trainer.fit()
    return told, notes


def test_versions_go_on_and_random_states_do_not_matter(workers, tmp_path):
    hf, whole, cut = write_tiny_hf(tmp_path / "hf", **MODEL), tmp_path / "whole", tmp_path / "cut"
    ((told, notes),) = workers.run(1, fit, hf, whole, free_port(), 0)
    assert not any("changed" in note for note in notes)
    later = [
        ("step 3", 1), ("published", 2), ("step 4", 2), ("published", 3), ("evaluated", 3),
    ]  # fmt: skip
    assert told == [
        ("published", 0), ("evaluated", 0), ("step 1", 0), ("step 2", 0), ("published", 1), *later,
    ]  # fmt: skip

    shutil.copytree(whole, cut)
    saved = cut / f"checkpoints/step_{SAVED_AT:06d}"
    (cut / "checkpoints/latest").write_text(saved.name)
    # Checkpoints had one of each rank once.
    torch.save(torch.get_rng_state(), saved / "rng_0000.pt")
    seal(saved)
    ((told, notes),) = workers.run(1, fit, hf, cut, free_port(), 1_000_000)
    assert told == [("published", 1), *later]
    assert notes[:2] == [
        f"resumed {cut} after step {SAVED_AT}",
        f"changed since {saved}: logging.run_dir: {whole} -> {cut}",
    ]
    assert rows(cut) == rows(whole) and len(rows(cut)) == STEPS + 1
    states = [run / f"checkpoints/step_{STEPS:06d}/state.json" for run in (whole, cut)]
    of_whole, of_cut = (json.loads(path.read_text()) for path in states)
    for state, run in ((of_whole, whole), (of_cut, cut)):
        assert state["run"]["config"]["logging"].pop("run_dir") == str(run)
    assert of_cut == of_whole and of_cut["run"]["policy_version"] == STEPS - 1
