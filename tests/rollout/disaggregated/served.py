"""Rollout workers in the tests' own processes, and a trainer's end to ask them.

Both worlds, their store, orders, collectives, staging, verdicts and files are real. Stand-ins: the
engine, which counts tokens, and the weight sync, which brings it one number.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from tests import jsonl
from tests.dumped import MODEL
from tests.rollout.disaggregated.lengths import Lengths
from tests.rollout.test_partial import Counting
from tests.whole_run import settings, without_vllm, write_inputs
from vapo_megatron.rollout.source import StepRequest
from vapo_megatron.weights.reshard.plan import LiveWeight

TRAINERS, WORKERS = 2, 2
WEIGHT = "weight"
REFUSED = 5
"""Row of the problems that no verifier judges."""


class Sync:
    """Brings the sum of squares of the trainers' parameters, and the version, to the engines."""

    def __init__(self, shape, ranks, model, rollout, engine, worlds=None):
        self.engine, self.worlds = engine, worlds

    def publish(self, chunks, policy_version):
        from vapo_megatron.parallel.reduce import gather_objects

        parameters = [p for chunk in chunks for p in chunk.parameters()]
        size = sum(float(p.detach().double().square().sum()) for p in parameters) + policy_version
        said = gather_objects((policy_version, size), self.worlds.group)
        assert len({version for version, _ in said}) == 1, said
        if self.engine is not None:
            with self.engine.weights_replaced(policy_version):
                self.engine.live_weights()[WEIGHT].tensor.fill_(said[0][1])
        return {"sync/received_bytes": 8.0}


class WorkersEngine(Counting):
    """Its tokens are of its weight, which must be the version's that it is asked for."""

    size = 1
    """Ranks of a replica."""

    def __init__(self, seed):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        super().__init__(rank // self.size, world_size // self.size, seed=seed)
        self.keeps_rollouts = rank % self.size == 0
        self.weight = torch.zeros(1, dtype=torch.float64)

    def live_weights(self):
        return {WEIGHT: LiveWeight(self.weight, 0)}

    @contextlib.contextmanager
    def weights_replaced(self, policy_version):
        self.policy_version = None
        yield
        self.policy_version = policy_version

    def run(self, work, sampling, version, show, has_time):
        assert version == self.policy_version, f"{version} of {self.policy_version}"
        return super().run(work, sampling, version, show, has_time)

    def token(self, version, at):
        return 3 + (7 * version + at + int(self.weight * 1e6)) % (MODEL["vocab"] - 3)


class Pair(WorkersEngine):
    """Two ranks are one replica."""

    size = 2


def inputs(tmp):
    """(model, directory): problems w3, w4, ...; math judges every third, row 5 is refused."""
    hf, _ = write_inputs(tmp, test=3)
    rows = [{"prompt": f"w{i + 3}", "answer": "none" if i == REFUSED else "7"} for i in range(40)]
    rows = [{**row, "verifier": "math"} if i % 3 == 0 else row for i, row in enumerate(rows)]
    jsonl.write(tmp / "train.jsonl", rows)
    return hf, tmp


def apart(hf, tmp, run_dir, **sections):
    """Settings of a run of TRAINERS and WORKERS with its files in a directory."""
    given = {
        "algorithm": {"value_pretraining_steps": 1, "policy_steps": 4},
        "rollout": {"max_response_tokens": 20, "max_logprob_difference": None},
        "parallel": {"world_size": TRAINERS},
        "optimizer": {"actor_learning_rate": 1e-2, "actor_warmup_updates": 0},
        "data": {"train_path": str(tmp / "train.jsonl"), "shuffle": False, "skip_unusable": True},
        "reward": {"num_workers": 1},
        "checkpoint": {"hf_export": False, "every_steps": 2, "keep_last": 9},
        "logging": {"dump_steps": 9, "rollout_groups": 9},
    }
    apart = {"placement": "disaggregated", "num_processes": WORKERS}
    sections["rollout"] = {**apart, **sections.get("rollout", {})}
    for name, fields in sections.items():
        given[name] = {**given.get(name, {}), **fields}
    return settings(hf, run_dir, **given)


def is_worker(settings):
    """Whether this process of the tests samples for others."""
    return dist.get_rank() >= settings.parallel.world_size


@contextlib.contextmanager
def stand_ins():
    """Neither vLLM nor a weight sync in what is built in the body."""
    from vapo_megatron.rollout.disaggregated import server, source

    with (
        mock.patch.object(server, "WeightSync", Sync),
        mock.patch.object(source, "WeightSync", Sync),
    ):
        yield


def served(settings, make_engine=WorkersEngine):
    """Serve as a rollout worker until the trainers end the run; the server, as it is then."""
    from vapo_megatron.cli.train import SERVED
    from vapo_megatron.planning.host_memory import rollout_host_bytes
    from vapo_megatron.rollout.disaggregated.server import Server

    inputs = inputs_of(settings)
    needed = rollout_host_bytes(inputs.shape, settings, 1).by_purpose
    sections = {name: getattr(settings, name) for name in SERVED}
    dist.destroy_process_group()
    with stand_ins(), without_vllm(make_engine):
        with Server(inputs, needed, seed=settings.seed, **sections, verifier=Lengths()) as server:
            server.serve()
    return server


def inputs_of(settings):
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.rollout.inputs import read_inputs

    s = settings
    shape = read_model_shape(str(s.model.hf_path))
    return read_inputs(shape, str(s.model.hf_path), s.data, s.rollout, s.evaluation, seed=s.seed)


class Asking:
    """The trainers' end without models: steps, versions and checkpoints as a test asks for them."""

    def __init__(self, settings):
        from vapo_megatron.parallel import backend, groups
        from vapo_megatron.parallel.health.watchdog import Watchdog
        from vapo_megatron.parallel.offload import check_host_memory
        from vapo_megatron.rollout.disaggregated.source import RemoteSampling

        s = self.settings = settings
        inputs = inputs_of(s)
        dist.destroy_process_group()
        self.worlds = backend.initialize_distributed(60, s.rollout.num_processes)
        # The rollout workers' watchdogs wait for its heartbeat.
        self.watchdog = Watchdog(
            s.timeouts, Path(s.logging.run_dir), self.worlds.rank, self.worlds.world_size,
            lambda: False, "trainer",
        )  # fmt: skip
        self.ranks = groups.initialize(s.parallel, s.seed)
        with stand_ins():
            self.source = RemoteSampling(
                inputs, self.ranks, self.worlds, model=s.model, rollout=s.rollout,
                algorithm=s.algorithm, logging=s.logging, waiting=self.watchdog.waiting,
            )  # fmt: skip
        self.hidden_size = inputs.shape.hidden_size
        check_host_memory({}, s.parallel, [], self.worlds.group)

    def step(self, step, version, has_time=None):
        """Publish a version if it is new, and train on a step; (positions, metrics)."""
        from vapo_megatron.data.packing import plan_of
        from vapo_megatron.parallel.exchange import exchange, gather_summary

        s, group = self.settings, self.worlds.group
        if not self.source.holds(version):
            self.source.publish((), version)
        asked = StepRequest(step, version, phase, has_time=has_time)
        scored, metrics = self.source.rollouts(asked)
        summary = gather_summary(scored, s.algorithm.responses_per_step, group)
        plan = plan_of(
            summary.sequence_lengths, s.algorithm, s.parallel, hidden_size=self.hidden_size,
            seed=s.seed, step=step,
        )  # fmt: skip
        wanted = [plan.positions(dp_rank) for dp_rank in range(self.ranks.dp_size)]
        batch = exchange(scored, summary, wanted, self.ranks, group)
        return batch.positions.tolist(), metrics

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.source.close()
            dist.barrier(group=self.worlds.group)
        self.worlds.close()
        self.watchdog.close()


@contextlib.contextmanager
def phase(name):
    yield lambda *_, **__: None
