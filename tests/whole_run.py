"""Whole trainers in the tests' own processes: their settings, and stand-ins for what samples.

`Engine` stands where vLLM would: what it is asked, and what becomes of its answers, is real.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from array import array
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests import jsonl
from tests.dumped import MODEL, config
from tests.rollout.tiny_tokenizer import ANSWERS
from tests.weights.tiny_hf import write_tiny_model
from vapo_megatron.errors import Stopped
from vapo_megatron.rollout.source import RolloutSource

ENGINE = "vapo_megatron.rollout.vllm.engine"
RIGHT, WRONG = MODEL["vocab"] - 2, MODEL["vocab"] - 1
"""Tokens of a model with the tokenizer of `write_inputs`: 7 and 8."""


def settings(hf, run_dir, seed=0, **sections):
    """Those of tests/dumped.py in a directory, with these sections, that show nothing."""
    logging = {"run_dir": str(run_dir), "tensorboard": False, "progress": "off"}
    sections["logging"] = {**logging, **sections.get("logging", {})}
    return config(hf, **sections).model_copy(update={"seed": seed})


def write_inputs(tmp, model=MODEL, **counts):
    """(model with a tokenizer, directory): problems w3, w4, ... in a file of each name.

    model: arguments of write_tiny_hf.
    """
    for name, count in counts.items():
        write_problems(tmp / f"{name}.jsonl", range(count))
    return write_tiny_model(tmp / "hf", last=ANSWERS, **model), tmp


def write_problems(file, numbers):
    rows = [{"prompt": f"w{i + 3}", "answer": "7"} for i in numbers]
    jsonl.write(file, rows)


@contextlib.contextmanager
def trainer(settings, replay=None, source=None, of="VapoTrainer", **more):
    """A trainer, or one of another class, in the place of the test's own process group.

    source: what gives its responses, made of the trainer; None: as the settings say.
    """
    from vapo_megatron.training import loop

    kind = getattr(loop, of)
    dist.destroy_process_group()
    with contextlib.ExitStack() as stack:
        if source is not None:
            made = mock.patch.object(kind, "_source", lambda trainer, *_: source(trainer))
            stack.enter_context(made)
        yield stack.enter_context(kind(settings, replay, **more))


class Given(RolloutSource):
    """Gives what a function makes of what the trainer asks for."""

    def __init__(self, give):
        self.give, self.kept = give, []

    def rollouts(self, asked):
        return self.give(asked), {}

    def keep(self, step, scored, phase):
        self.kept.append(list(scored))


class Engine:
    """A replica's rank, with what a subclass responds; as vLLM, it ends them in any order."""

    keeps_rollouts, at_once, policy_version = True, 256, None

    def __init__(self, replica=None, num_replicas=None, seed=0):
        self.replica = dist.get_rank() if replica is None else replica
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.seed, self.counts = seed, {}

    def run(self, work, sampling, policy_version, on_progress=None, has_time=None):
        if has_time is not None and not has_time():
            raise Stopped
        requests, done = [], 0
        while more := work.take(self.at_once):
            requests += more
        self.asked(requests, sampling, policy_version, has_time)
        for rollout, seed, *_ in self.order(requests):
            response = self.respond(rollout, seed)
            done += 1
            if response is not None:
                work.ended(response)
            if on_progress is not None:
                on_progress(done * self.num_replicas, work.expected * self.num_replicas)
        return []

    def count(self, key, number):
        self.counts[key] = self.counts.get(key, 0) + number
        return self.counts[key]

    def asked(self, requests, sampling, policy_version, has_time):
        """Take note."""

    def order(self, requests):
        return sorted(requests, key=lambda request: request.seed)

    def respond(self, rollout, seed):
        """The response, or None where vLLM gives it up."""
        raise NotImplementedError

    def shutdown(self):
        pass


def answered(rollout, token_ids, *, logprob=-0.5, truncated=False):
    """The whole response to a request."""
    ids, logprobs = array("i", token_ids), array("f", [logprob] * len(token_ids))
    return dataclasses.replace(rollout, token_ids=ids, logprobs=logprobs, truncated=truncated)


class Sync:
    """Notes which weights it would bring to an engine, by their sum of squares."""

    def __init__(self, shape, ranks, model, rollout, engine):
        self.engine = engine
        self.published: list[tuple[int, float]] = []

    def publish(self, chunks, policy_version):
        parameters = [p for chunk in chunks for p in chunk.parameters()]
        size = sum(float(p.detach().double().square().sum()) for p in parameters)
        self.published.append((policy_version, size))
        self.engine.policy_version = policy_version
        return {"sync/received_bytes": 1000.0 + policy_version}


@contextlib.contextmanager
def without_vllm(make):
    """Let what is built in the body call make(seed) where it would start vLLM."""
    from vapo_megatron.rollout import sampling

    stand_in = types.ModuleType(ENGINE)
    stand_in.RolloutEngine = lambda *_, seed, **__: make(seed)
    real = sys.modules.get(ENGINE)
    sys.modules[ENGINE] = stand_in
    try:
        with mock.patch.object(sampling, "WeightSync", Sync):
            yield
    finally:
        del sys.modules[ENGINE]
        if real is not None:
            sys.modules[ENGINE] = real


def measured(run_dir):
    """Of each row what does not depend on a machine's speed and memory."""
    varying = ("time/", "memory/", "tokens_per_second")
    rows = jsonl.read(run_dir / "metrics.jsonl")
    return [{n: v for n, v in row.items() if not n.startswith(varying)} for row in rows]


def saved(run_dir, step, role):
    """Every tensor of a role's checkpoint in full, as torch reads it."""
    tensors = {}
    _load_state_dict(
        tensors,
        storage_reader=FileSystemReader(run_dir / f"checkpoints/step_{step:06d}/{role}"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return {name: value for name, value in tensors.items() if torch.is_tensor(value)}
