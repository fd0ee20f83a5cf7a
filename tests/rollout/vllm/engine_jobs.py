"""What the worker processes of test_engine.py do with real engines; the tests judge the results."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import itertools
import os
import pickle
import random
import socket
from pathlib import Path
from typing import Any
from unittest import mock

from tests.rollout.vllm.poisoned_sleep import poison_sleep
from vapo_megatron.data.rollout import Prompt, Rollout
from vapo_megatron.errors import Stopped
from vapo_megatron.rollout.requests import SamplingSettings
from vapo_megatron.rollout.work import generate as whole_groups

SEED = 5
MAX_PROMPT, MAX_RESPONSE = 200, 32


def settings(temperature=1.0, top_p=1.0, top_k=-1, limit=MAX_RESPONSE, role="train"):
    return SamplingSettings(temperature, top_p, top_k, limit, role)


def prompts(count: int, group_size: int = 1, length: int | None = None, vocab: int = 64) -> list:
    """The repeated list; problem i is the same in every call."""
    made = []
    for index in range(count):
        rng = random.Random(index)
        size = length or rng.randint(1, 30)
        ids = tuple(rng.randrange(3, vocab) for _ in range(size))
        made += [Prompt(index, f"problem {index}", ids, "0")] * group_size
    return made


def generate(engine: Any, ask: list, group_size: int, *rest: Any, **named: Any) -> list[Rollout]:
    """Groups of one size, sampled by an engine."""
    return whole_groups(engine, ask, [group_size] * (len(ask) // group_size), *rest, **named)


def config(tmp: Path, tp_size: int, *overrides: str) -> Any:
    from vapo_megatron.config import load_config

    (tmp / "empty.yaml").touch()
    return load_config(
        tmp / "empty.yaml",
        [
            "parallel.world_size=2", "parallel.offload=true", "model.dtype=float32",
            f"seed={SEED}", "rollout.kv_cache_bytes=64000000",
            f"rollout.tensor_model_parallel_size={tp_size}",
            f"rollout.max_prompt_tokens={MAX_PROMPT}",
            f"rollout.max_response_tokens={MAX_RESPONSE}", *overrides,
        ],
    )  # fmt: skip


def build_engine(path: Path, config: Any) -> Any:
    """An engine with the directory's own tokenizer."""
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel.offload import is_on
    from vapo_megatron.rollout.inputs import Inputs
    from vapo_megatron.rollout.tokenizer import check_tokenizer, load_tokenizer
    from vapo_megatron.rollout.vllm.engine import RolloutEngine

    shape, tokenizer, rollout = read_model_shape(path), load_tokenizer(path), config.rollout
    stop = check_tokenizer(path, tokenizer, rollout.stop_token_ids, shape.vocab_size)
    return RolloutEngine(
        str(path), Inputs(shape, tokenizer, stop), rollout,
        dtype=config.model.dtype, seed=config.seed, offload=is_on(config.parallel),
        returns_routes=config.algorithm.router_replay == "r3",
        adapters=config.model.lora if rollout.adapter_sync == "adapter" else None,
    )  # fmt: skip


def process_state() -> str:
    """Everything of the trainer's that vLLM might touch, hashed."""
    import numpy as np
    import torch

    maps = Path("/proc/self/numa_maps")
    bound = maps.exists() and any("bind" in line.split()[1] for line in maps.open())
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    state = (
        random.getstate(), np.random.get_state()[1].tobytes(),
        torch.get_rng_state().numpy().tobytes(),
        sorted(environment.items()), bound,
        torch.set_num_threads.__module__, torch.get_num_threads(),
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_float32_matmul_precision(),
    )  # fmt: skip
    return hashlib.sha256(pickle.dumps(state)).hexdigest()


def odd_completions(tmp: Path) -> list:
    """What generate makes of requests that end in each way; vLLM alone is a stand-in."""
    from types import SimpleNamespace

    from vllm.logprobs import FlatLogprobs

    from vapo_megatron.rollout.vllm import engine as module

    def ended(reason, *token_ids, logprob=-0.5):
        logprobs = FlatLogprobs()
        for token_id in token_ids:
            logprobs.append_fast([token_id], [logprob], [1], [None])
        return SimpleNamespace(token_ids=list(token_ids), logprobs=logprobs, finish_reason=reason)

    completions = {
        0: ended("stop", 4, 2),
        1: ended("length", 4, 5),
        2: ended("abort", 4),
        # Nothing of 3 came back.
        4: ended("length"),
        5: ended("stop", 2, logprob=float("nan")),
    }
    engine = object.__new__(module.RolloutEngine)
    engine._max_response_tokens, engine.seed, engine.at_once = MAX_RESPONSE, SEED, 9
    engine.stop_token_ids, engine._asleep = (2,), set()
    engine.replica, engine.num_replicas, engine.policy_version = 0, 1, 7

    def complete(one, more, keep, *_, **__):
        seeds = [seed for seed, *_ in more(9)]
        for position, completion in reversed(completions.items()):
            keep(seeds[position], completion)
        return {}

    engine._llm = SimpleNamespace(llm_engine=None, reset_prefix_cache=lambda: True)
    engine.keeps_rollouts, engine._returns_routes, finished = True, False, []
    engine._adapter = None
    with mock.patch.object(module, "complete", complete):
        returned = generate(engine, prompts(3, 2), 2, 1, settings(), 7, on_finished=finished.append)
    return returned, [r.position for r in finished]


class NoNetwork:
    """Records attempts to reach anything but this machine, and makes them fail."""

    def __enter__(self) -> list:
        attempts: list = []
        self._connect = socket.socket.connect
        self._resolve = socket.getaddrinfo

        def connect(this, address):
            if this.family != socket.AF_UNIX and not str(address[0]).startswith("127."):
                attempts.append(address)
                raise OSError("no network in this test")
            return self._connect(this, address)

        def resolve(host, *rest, **named):
            if host not in (None, "localhost", socket.gethostname()):
                attempts.append(host)
                raise OSError("no network in this test")
            return self._resolve(host, *rest, **named)

        socket.socket.connect, socket.getaddrinfo = connect, resolve
        return attempts

    def __exit__(self, *error: object) -> None:
        socket.socket.connect, socket.getaddrinfo = self._connect, self._resolve


def weights(hf_path: Path) -> list:
    """(name, tensor) pairs of a directory."""
    from safetensors.torch import load_file

    return list(load_file(Path(hf_path) / "model.safetensors").items())


def error_of(function, *args, **named) -> str:
    """The type and the message of what a call raises."""
    try:
        function(*args, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _loading_errors(engine, first: list) -> dict[str, str]:
    one = prompts(2)
    found = {"before loading": error_of(generate, engine, one, 1, 0, settings(), 0)}
    part = [p for p in first if p[0] != "model.layers.1.self_attn.v_proj.weight"]
    found["missing"] = error_of(engine.load_weights, part, 0)
    found["after a failed load"] = error_of(generate, engine, one, 1, 0, settings(), 0)
    found["twice"] = error_of(engine.load_weights, [*first, first[0]], 0)
    found["unknown"] = error_of(engine.load_weights, [*first, ("model.other", first[0][1])], 0)
    engine.load_weights(iter(first), 3)
    found["other version"] = error_of(generate, engine, one, 1, 0, settings(), 4)
    found["over the limit"] = error_of(
        generate, engine, one, 1, 0, settings(limit=MAX_RESPONSE + 1), 3
    )
    return found


def count_completions() -> int:
    """vLLM's objects of whole responses that something still refers to."""
    from vllm.outputs import CompletionOutput

    return sum(type(thing) is CompletionOutput for thing in gc.get_objects())


def _limits(engine, step: int) -> dict[str, Any]:
    """Re-run a response that stopped, with its own length as the limit, and with one less."""
    found: dict[str, Any] = {}
    sampled = generate(engine, prompts(40), 1, step, settings(), 3)
    stopped = next(r for r in sampled if not r.truncated and len(r.token_ids) > 5)
    length = len(stopped.token_ids)
    found["stopped"] = stopped
    for name, limit in (("exact", length), ("one less", length - 1)):
        again = generate(engine, prompts(40), 1, step, settings(limit=limit), 3)
        found[name] = next(r for r in again if r.position == stopped.position)
    return found


def _shared(engine, ask: list) -> list:
    """The same requests from one list, six at once; the second replica waits for the first."""
    import torch.distributed as dist

    one, store = engine._llm.llm_engine, dist.distributed_c10d._get_default_store()
    step, engine.at_once, engine._store = one.step, 6, store
    if engine.replica == 1:
        one.step = lambda: [store.wait(["first replica is done"]), step()][1]
    counts: list = []
    asked = dataclasses.replace(settings(), shared=True)
    taken = generate(engine, ask, 3, 1, asked, 3, lambda *count: counts.append(count))
    if engine.replica == 0:
        store.set("first replica is done", "")
    one.step, engine.at_once, engine._store = step, 256, None
    return taken, counts


def two_replicas(tmp: Path, first_path: Path, second_path: Path) -> dict[str, Any]:
    """World 2, TP=1: two engines that never talk to each other."""
    import torch
    import torch.distributed as dist

    from tests.rollout.vllm.sleep_jobs import woken_by_loading

    poison_sleep()
    rank = dist.get_rank()
    trainers_group = dist.new_group([0, 1])
    random.seed(rank)
    torch.manual_seed(rank)
    with NoNetwork() as attempts:
        before = process_state()
        engine = build_engine(first_path, config(tmp, 1))
        found: dict[str, Any] = {"constructor": (before, process_state())}
        found["facts"] = engine.replica, engine.num_replicas, engine.stop_token_ids
        first = weights(first_path)
        found["errors"] = _loading_errors(engine, first)

        before = process_state()
        calls: list = []
        told: list = []
        ask = prompts(12, group_size=3)
        found["sampled"] = generate(
            engine, ask, 3, 1, settings(), 3, on_finished=told.append,
            on_progress=lambda *c: calls.append((*c, len(told), count_completions())),
        )  # fmt: skip
        found["generate"] = (before, process_state())
        found["progress"] = calls

        found["shared"] = _shared(engine, ask)

        # Half of the problems, turned round: other neighbours and, for most, the other replica.
        found["elsewhere"] = generate(
            engine,
            [p for i in range(11, 5, -1) for p in ask[3 * i : 3 * i + 3]],
            3,
            1,
            settings(),
            3,
        )
        found["next step"] = generate(engine, ask, 3, 2, settings(), 3)
        found["evaluation"] = generate(engine, ask, 3, 1, settings(role="evaluation"), 3)
        found["filtered"] = generate(engine, ask, 3, 1, settings(0.7, 0.8, 12), 3)
        found["greedy"] = generate(engine, ask[::3], 1, 1, settings(0), 3)
        found["limits"] = _limits(engine, 1)
        found["fewer than replicas"] = generate(engine, ask[:1], 1, 1, settings(), 3)
        found["first tokens"] = [
            r.token_ids[0]
            for r in generate(engine, prompts(1, 4000), 4000, 1, settings(limit=1), 3)
        ]

        # Prompts long enough to leave whole blocks in the prefix cache; then other weights.
        long = prompts(4, length=MAX_PROMPT)
        found["long"] = generate(engine, long, 1, 1, settings(0), 3)
        engine.load_weights(weights(second_path), 4)
        found["long, second weights"] = generate(engine, long, 1, 1, settings(0), 4)
    found["sleep"] = woken_by_loading(engine, weights(second_path), first)
    found["network"] = attempts
    found["compiled"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    engine.shutdown()
    engine.shutdown()
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    dist.all_reduce(total, group=trainers_group)
    found["trainer's groups after shutdown"] = int(total)
    return found


def one_replica(tmp: Path, path: Path) -> dict[str, Any]:
    """World 2, TP=2, in processes that had an engine before: one engine over both."""
    import torch
    import torch.distributed as dist

    from tests.rollout.vllm.sleep_jobs import woken_by_sync
    from vapo_megatron.rollout.vllm import running

    poison_sleep()
    rank = dist.get_rank()
    random.seed(rank)
    torch.manual_seed(rank)
    stop = "rollout.stop_token_ids=[7, 9]"
    run = config(tmp, 2, stop)
    engine = build_engine(path, run)
    keeps, engine.keeps_rollouts = engine.keeps_rollouts, True
    found: dict[str, Any] = {"facts": (engine.replica, engine.num_replicas, engine.stop_token_ids)}
    all_weights = weights(path)
    part = [p for p in all_weights if p[0] != "model.layers.0.mlp.up_proj.weight"]
    found["missing"] = error_of(engine.load_weights, part, 0)
    engine.load_weights(all_weights, 0)
    ask = prompts(32, group_size=2)
    # One rank has no time after some tokens; what is sampled next shows nothing of it.
    running.TOKENS_BETWEEN_QUESTIONS = 4
    questions: list[int] = []

    def has_time() -> bool:
        questions.append(rank)
        return rank == 0 or len(questions) < 3

    stopped = error_of(generate, engine, ask, 2, 1, settings(), 0, None, has_time)
    found["stopped"] = stopped, len(questions)
    found["sampled"] = generate(engine, ask, 2, 1, settings(), 0)
    found["greedy"] = generate(engine, ask[::2], 1, 1, settings(0), 0)
    engine.keeps_rollouts = keeps
    found["kept"] = len(generate(engine, ask, 2, 1, settings(), 0))
    engine.at_once, engine._store = 8, dist.distributed_c10d._get_default_store()
    found["shared"] = generate(engine, ask, 2, 1, dataclasses.replace(settings(), shared=True), 0)
    engine.at_once, engine._store = 256, None
    engine.keeps_rollouts = True
    engine.sleep()
    engine.load_weights(all_weights, 1)
    found["woken"] = generate(engine, ask[::2], 1, 1, settings(0), 1)
    found["synced"] = woken_by_sync(engine, path, run.rollout)
    found["compiled"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found["shared memory"] = [f.name for f in Path("/dev/shm").glob("*cpushm*")]
    engine.shutdown()
    dist.barrier()
    return found


def host_bytes(tmp: Path, path: Path) -> tuple[float, float]:
    """World 2, TP=1: Python's bytes per response token, with responses of 500, 16 at a time.

    Of those being sampled, after token 260, because Python holds smaller numbers once; and of the
    first 16, which are finished while the others are sampled.
    """
    import tracemalloc

    sizes = ("max_prompt_tokens=8", "max_response_tokens=500", "max_num_sequences=16")
    engine = build_engine(path, config(tmp, 1, *(f"rollout.{size}" for size in sizes)))
    engine.load_weights(weights(path), 0)
    engine.stop_token_ids = ()  # So that all are of the same length.
    ask = prompts(64, length=8)
    generate(engine, ask[:32], 1, 1, settings(limit=9), 0)
    step, steps, held = engine._llm.llm_engine.step, itertools.count(), {}

    def watched():
        number = next(steps)
        if number in (260, 499, 760):
            gc.collect()
            held[number] = tracemalloc.get_traced_memory()[0]
        return step()

    engine._llm.llm_engine.step = watched
    tracemalloc.start()
    try:
        with contextlib.suppress(Stopped):
            has_time = lambda: 760 not in held  # noqa: E731
            generate(engine, ask, 1, 2, settings(limit=500), 0, has_time=has_time)
    finally:
        tracemalloc.stop()
    engine.shutdown()
    # In step 760 there are as many tokens of those being sampled as in step 260.
    return (held[499] - held[260]) / (239 * 16), (held[760] - held[260]) / (500 * 16)


def preempting(tmp: Path, path: Path) -> list:
    """World 2, TP=1, with a KV cache of 8 blocks of 128 tokens, for 15 responses of up to 142.

    Returns: how often a response was preempted, the responses, and those of a large cache.
    """
    ask = prompts(30, length=110)
    engine = build_engine(path, config(tmp, 1))
    engine.load_weights(weights(path), 0)
    expected = generate(engine, ask, 1, 1, settings(), 0)
    engine.shutdown()
    # 2 layers * 2 (keys, values) * 2 heads * 32 * 4 bytes = 1024 bytes a token
    small = f"rollout.kv_cache_bytes={8 * 128 * 1024}"
    engine = build_engine(path, config(tmp, 1, small))
    engine.load_weights(weights(path), 0)
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    preempt, count = scheduler._preempt_request, []
    scheduler._preempt_request = lambda *a, **k: (count.append(1), preempt(*a, **k))[1]
    sampled = generate(engine, ask, 1, 1, settings(), 0)
    engine.shutdown()
    return [len(count), sampled, expected]


def of_family(tmp: Path, first_path: Path, second_path: Path) -> dict[str, Any]:
    """World 2, TP=2 on both sides: vLLM reads what Megatron exported, then takes other weights."""
    import torch.distributed as dist

    from tests.weights.loaded import Layout, load
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.rollout.vllm import engine as engine_module
    from vapo_megatron.weights.export_hf import export_hf
    from vapo_megatron.weights.load_hf import load_hf_weights
    from vapo_megatron.weights.reshard.sync import WeightSync

    # With experts these are apart, too.
    ep = 2 if "moe" in read_model_shape(first_path).family else 1
    chunks, shape, ranks, _, trainer = load(str(first_path), Layout(tp=2, ep=ep))
    out = tmp / "exported"
    export_hf(chunks, shape, ranks, out, first_path)
    arguments = engine_module.engine_arguments
    engine_module.engine_arguments = lambda *a, **k: {
        **arguments(*a, **k), "load_format": "safetensors"
    }  # fmt: skip
    try:
        engine = build_engine(out, config(tmp, 2))
    finally:
        engine_module.engine_arguments = arguments
    engine.policy_version = 0
    ask = prompts(8)
    found = {"first": generate(engine, ask, 1, 1, settings(0), 0)}
    load_hf_weights(chunks, shape, second_path, ranks, "actor")
    WeightSync(shape, ranks, trainer.model, config(tmp, 2).rollout, engine).publish(chunks, 1)
    found["second"] = generate(engine, ask, 1, 1, settings(0), 1)
    engine.shutdown()
    dist.barrier()
    return found


def with_fp8_cache(tmp: Path, path: Path) -> dict[str, Any]:
    """World 2, TP=1: greedy responses of the same weights with keys and values in 16 and 8 bits."""
    import torch.distributed as dist

    found: dict[str, Any] = {}
    for name in ("auto", "fp8"):
        made = config(tmp, 1, "model.dtype=bfloat16", f"rollout.kv_cache_dtype={name}")
        engine = build_engine(path, made)
        engine.load_weights(weights(path), 0)
        engine.sleep()
        engine.load_weights(weights(path), 1)
        caches = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches
        found[name] = {
            "bytes": sum(cache.nbytes for cache in caches), "types": {c.dtype for c in caches},
            "blocks": engine._llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
            "rollouts": generate(engine, prompts(8), 1, 1, settings(0, limit=8), 1),
        }  # fmt: skip
        engine.shutdown()
        dist.barrier()
    return found


def refused(tmp: Path, path: Path, *overrides: str) -> str:
    """What the constructor says of a model or settings that vLLM cannot serve."""
    import torch.distributed as dist

    error = error_of(build_engine, path, config(tmp, 1, *overrides))
    dist.barrier()
    return error
