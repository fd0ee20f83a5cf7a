"""What the worker processes of test_engine.py do with real engines; the tests judge the results."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import socket
import sys
from pathlib import Path
from typing import Any

from vapo_megatron.data.batch import Prompt
from vapo_megatron.rollout.requests import SamplingSettings

SEED = 5
MAX_PROMPT, MAX_RESPONSE = 200, 40


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


def config(tmp: Path, tp_size: int, *overrides: str) -> Any:
    from vapo_megatron.config import load_config

    (tmp / "empty.yaml").touch()
    return load_config(
        tmp / "empty.yaml",
        [
            "parallel.world_size=2", "model.dtype=float32", f"seed={SEED}",
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

    from vapo_megatron.rollout.vllm.engine import RolloutEngine

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
    engine = object.__new__(RolloutEngine)
    engine._max_response_tokens, engine._seed = MAX_RESPONSE, SEED
    engine._tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: [str(i) for i in ids])
    engine.stop_token_ids, engine._asleep = (2,), set()
    engine.replica, engine.num_replicas, engine.policy_version = 0, 1, 7
    engine._complete = lambda requests, keep, *_: [keep(*c) for c in reversed(completions.items())]
    engine.keeps_rollouts, finished = True, []
    returned = engine.generate(prompts(3, 2), 2, 1, settings(), 7, on_finished=finished.append)
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
    found = {"before loading": error_of(engine.generate, one, 1, 0, settings(), 0)}
    part = [p for p in first if p[0] != "model.layers.1.self_attn.v_proj.weight"]
    found["missing"] = error_of(engine.load_weights, part, 0)
    found["after a failed load"] = error_of(engine.generate, one, 1, 0, settings(), 0)
    found["twice"] = error_of(engine.load_weights, [*first, first[0]], 0)
    found["unknown"] = error_of(engine.load_weights, [*first, ("model.other", first[0][1])], 0)
    engine.load_weights(iter(first), 3)
    found["other version"] = error_of(engine.generate, one, 1, 0, settings(), 4)
    found["over the limit"] = error_of(
        engine.generate, one, 1, 0, settings(limit=MAX_RESPONSE + 1), 3
    )
    return found


def _limits(engine, step: int) -> dict[str, Any]:
    """Re-run a response that stopped, with its own length as the limit, and with one less."""
    found: dict[str, Any] = {}
    sampled = engine.generate(prompts(40), 1, step, settings(), 3)
    stopped = next(r for r in sampled if not r.truncated and len(r.token_ids) > 5)
    length = len(stopped.token_ids)
    found["stopped"] = stopped
    for name, limit in (("exact", length), ("one less", length - 1)):
        again = engine.generate(prompts(40), 1, step, settings(limit=limit), 3)
        found[name] = next(r for r in again if r.position == stopped.position)
    return found


def _sleeping(engine, now: list, then: list) -> dict[str, Any]:
    """Sleep with the weights `now`, wake with `then`; they are spoilt as a GPU's would be lost."""
    import torch

    found: dict[str, Any] = {"events": []}
    core = engine._llm.llm_engine.engine_core.engine_core
    worker, scheduler = core.model_executor.driver_worker.worker, core.scheduler
    original = (
        worker.sleep,
        worker.wake_up,
        scheduler.reset_prefix_cache,
        engine._model().load_weights,
    )

    def sleep(level):
        found["events"].append(f"sleep {level}")
        original[0](level)
        for weight in engine.live_weights().values():
            weight.tensor.fill_(torch.nan)

    def wake_up(tags):
        found["events"].append(f"wake {tags}")
        original[1](tags)

    def reset(*arguments, **named):
        found["events"].append("reset")
        return original[2](*arguments, **named)

    def load(tensors):
        found["events"].append("load")
        return original[3](tensors)

    worker.sleep, worker.wake_up, scheduler.reset_prefix_cache = sleep, wake_up, reset
    engine._model().load_weights = load
    ask = prompts(8)
    engine.load_weights(now, 5)
    engine.generate(ask, 1, 0, settings(0), 5)
    del found["events"][:]
    engine.sleep()
    engine.sleep()
    found["asleep"] = error_of(engine.generate, ask, 1, 0, settings(0), 5)
    found["paused"] = core.is_scheduler_paused()
    engine.load_weights(then, 6)
    found["between"] = sorted(core.model_executor.sleeping_tags)
    found["awake"] = engine.generate(ask, 1, 0, settings(0), 6)
    found["running"] = not core.is_sleeping()
    engine.load_weights(now, 7)
    found["once"] = list(found["events"])
    engine.sleep()
    engine.load_weights(then, 8)
    engine.sleep()
    found["half awake, then asleep"] = sorted(core.model_executor.sleeping_tags)
    return found


def two_replicas(tmp: Path, first_path: Path, second_path: Path) -> dict[str, Any]:
    """World 2, TP=1: two engines that never talk to each other."""
    import torch
    import torch.distributed as dist

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
        ask = prompts(12, group_size=3)
        found["sampled"] = engine.generate(
            ask, 3, 1, settings(), 3, on_progress=lambda *c: calls.append(c)
        )
        found["generate"] = (before, process_state())
        found["progress"] = calls

        # Half of the problems, turned round: other neighbours and, for most, the other replica.
        found["elsewhere"] = engine.generate(
            [p for i in range(11, 5, -1) for p in ask[3 * i : 3 * i + 3]], 3, 1, settings(), 3
        )
        found["next step"] = engine.generate(ask, 3, 2, settings(), 3)
        found["evaluation"] = engine.generate(ask, 3, 1, settings(role="evaluation"), 3)
        found["filtered"] = engine.generate(ask, 3, 1, settings(0.7, 0.8, 12), 3)
        found["greedy"] = engine.generate(ask[::3], 1, 1, settings(0), 3)
        found["limits"] = _limits(engine, 1)
        found["fewer than replicas"] = engine.generate(ask[:1], 1, 1, settings(), 3)
        found["first tokens"] = [
            r.token_ids[0] for r in engine.generate(prompts(1, 4000), 4000, 1, settings(limit=1), 3)
        ]

        found["crowded"] = engine.generate(prompts(30, length=110), 1, 1, settings(), 3)

        # Prompts long enough to leave whole blocks in the prefix cache; then other weights.
        long = prompts(4, length=MAX_PROMPT)
        found["long"] = engine.generate(long, 1, 1, settings(0), 3)
        engine.load_weights(weights(second_path), 4)
        found["long, second weights"] = engine.generate(long, 1, 1, settings(0), 4)
    found["sleep"] = _sleeping(engine, weights(second_path), first)
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

    from vapo_megatron.rollout.vllm import engine as engine_module

    rank = dist.get_rank()
    random.seed(rank)
    torch.manual_seed(rank)
    stop = "rollout.stop_token_ids=[7, 9]"
    engine = build_engine(path, config(tmp, 2, stop))
    keeps, engine.keeps_rollouts = engine.keeps_rollouts, True
    found: dict[str, Any] = {"facts": (engine.replica, engine.num_replicas, engine.stop_token_ids)}
    all_weights = weights(path)
    part = [p for p in all_weights if p[0] != "model.layers.0.mlp.up_proj.weight"]
    found["missing"] = error_of(engine.load_weights, part, 0)
    engine.load_weights(all_weights, 0)
    ask = prompts(32, group_size=2)
    # One rank has no time after some tokens; what is sampled next shows nothing of it.
    engine_module.TOKENS_BETWEEN_QUESTIONS = 4
    questions: list[int] = []

    def has_time() -> bool:
        questions.append(rank)
        return rank == 0 or len(questions) < 3

    stopped = error_of(engine.generate, ask, 2, 1, settings(), 0, None, has_time)
    found["stopped"] = stopped, len(questions)
    found["sampled"] = engine.generate(ask, 2, 1, settings(), 0)
    found["greedy"] = engine.generate(ask[::2], 1, 1, settings(0), 0)
    engine.keeps_rollouts = keeps
    found["kept"] = len(engine.generate(ask, 2, 1, settings(), 0))
    engine.keeps_rollouts = True
    engine.sleep()
    engine.load_weights(all_weights, 1)
    found["woken"] = engine.generate(ask[::2], 1, 1, settings(0), 1)
    found["shared memory"] = [f.name for f in Path("/dev/shm").glob("*cpushm*")]
    engine.shutdown()
    dist.barrier()
    return found


def host_bytes(tmp: Path, path: Path) -> tuple[float, float]:
    """World 2, TP=1: Python's bytes per response token, with 16 responses of 500 in the sampler.

    Of those being sampled, after token 260, because Python holds smaller numbers once; and of the
    finished ones without their text.
    """
    import tracemalloc

    lengths = "rollout.max_prompt_tokens=8", "rollout.max_response_tokens=500"
    engine = build_engine(path, config(tmp, 1, *lengths))
    engine.load_weights(weights(path), 0)
    engine.stop_token_ids = ()  # So that all are of the same length.
    ask = prompts(32, length=8)
    engine.generate(ask, 1, 1, settings(limit=9), 0)
    step, held = engine._llm.llm_engine.step, []

    def watched():
        held.append(tracemalloc.get_traced_memory()[0])
        return step()

    engine._llm.llm_engine.step = watched
    tracemalloc.start()
    try:
        rollouts = engine.generate(ask, 1, 2, settings(limit=500), 0)
    finally:
        tracemalloc.stop()
    engine.shutdown()
    running = (held[-1] - held[260]) / ((len(held) - 1 - 260) * len(rollouts))
    finished = sum(sys.getsizeof(r.token_ids) + sys.getsizeof(r.logprobs) for r in rollouts)
    return running, finished / sum(len(r.token_ids) for r in rollouts)


def preempting(tmp: Path, path: Path) -> list:
    """World 2, TP=1, with a KV cache of 8 blocks of 128 tokens, for 15 responses of up to 150."""

    # 2 layers * 2 (keys, values) * 2 heads * 32 * 4 bytes = 1024 bytes a token
    small = f"rollout.kv_cache_bytes={8 * 128 * 1024}"
    engine = build_engine(path, config(tmp, 1, small))
    engine.load_weights(weights(path), 0)
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    preempt, count = scheduler._preempt_request, []
    scheduler._preempt_request = lambda *a, **k: (count.append(1), preempt(*a, **k))[1]
    sampled = engine.generate(prompts(30, length=110), 1, 1, settings(), 0)
    engine.shutdown()
    return [len(count), sampled]


def of_family(tmp: Path, first_path: Path, second_path: Path) -> dict[str, Any]:
    """World 2, TP=2 on both sides: vLLM reads what Megatron exported, then takes other weights."""
    import torch.distributed as dist

    from tests.weights.loaded import Layout, load
    from vapo_megatron.rollout.vllm import engine as engine_module
    from vapo_megatron.weights.export_hf import export_hf
    from vapo_megatron.weights.load_hf import load_hf_weights
    from vapo_megatron.weights.reshard.sync import WeightSync

    chunks, shape, ranks, _, trainer = load(str(first_path), Layout(tp=2))
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
    found = {"first": engine.generate(ask, 1, 1, settings(0), 0)}
    load_hf_weights(chunks, shape, second_path, ranks, "actor")
    WeightSync(shape, ranks, trainer.model, config(tmp, 2).rollout, engine).publish(chunks, 1)
    found["second"] = engine.generate(ask, 1, 1, settings(0), 1)
    engine.shutdown()
    dist.barrier()
    return found


def refused(tmp: Path, path: Path, *overrides: str) -> str:
    """What the constructor says of a model or settings that vLLM cannot serve."""
    import torch.distributed as dist

    error = error_of(build_engine, path, config(tmp, 1, *overrides))
    dist.barrier()
    return error
