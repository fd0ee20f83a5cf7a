"""vLLM inside the trainer's processes.

Every rank holds one vLLM worker. `rollout.tensor_model_parallel_size` consecutive ranks form a
replica, which samples its own share of each step; replicas do not communicate while they sample.
All ranks of a replica run the same scheduler over the same requests in the same order, so that
their collectives match; the first of them alone keeps the replica's rollouts.

With parallel.offload vLLM sleeps while the trainer computes: `sleep` drops weights and KV cache,
`weights_replaced` allocates the weights again, and the next `run` the cache, so that the
trainer's own weights can be offloaded in between.

vLLM assumes that it owns the process; process.py undoes or replaces what would harm the trainer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.config import RolloutConfig
from vapo_megatron.config.lora import LoraConfig
from vapo_megatron.data.rollout import Rollout
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.sampled import check_sampled
from vapo_megatron.parallel import store
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.requests import Request, SamplingSettings, Work, max_model_len
from vapo_megatron.rollout.vllm.adapter import Adapter
from vapo_megatron.rollout.vllm.arguments import engine_arguments
from vapo_megatron.rollout.vllm.interface import (
    BUILT_FOR_ROUTES,
    FINALIZER,
    MODEL,
    ROUTES,
    check_built,
    check_imports,
    reach,
)
from vapo_megatron.rollout.vllm.live_weights import live_weights, load_hf_tensors
from vapo_megatron.weights.reshard.plan import LiveWeight

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
for _name, _value in {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}.items():
    os.environ.setdefault(_name, _value)
# vLLM logs during import, before it reads the level itself.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    check_imports()

    from vllm import LLM
    from vllm.platforms import current_platform

    from vapo_megatron.rollout.vllm.completions import request, routes_of, sampled
    from vapo_megatron.rollout.vllm.process import (
        adapt_vllm,
        name_run,
        process_state_kept,
        random_state_kept,
        unlink_shared_memory,
    )
    from vapo_megatron.rollout.vllm.running import Asked, added, complete, told


T = TypeVar("T")


class RolloutEngine:
    """One rank of a vLLM replica; samples from weights that the trainer syncs to it."""

    def __init__(
        self,
        hf_path: str,
        inputs: Inputs,
        rollout: RolloutConfig,
        *,
        dtype: str,
        seed: int,
        offload: bool,
        returns_routes: bool = False,
        adapters: LoraConfig | None = None,
    ) -> None:
        """Build the engine with dummy weights, to be replaced before `run`. Collective.

        Args:
            hf_path: Hugging Face directory; vLLM reads its config.json.
            inputs: read from the same directory.
            rollout: sizes and memory.
            dtype: of the weights.
            seed: of the run; the responses' seeds depend on it.
            offload: the engine will be put to sleep.
            returns_routes: responses that are sampled for training come with Rollout.routes, on the
                first rank of a replica.
            adapters: the policy's are synced apart from its weights, which stay as they are.

        Raises:
            ConfigError: the lengths exceed the model's, or vLLM refuses the model.
        """
        rank, tp_size = dist.get_rank(), rollout.tensor_model_parallel_size
        self._max_response_tokens, self.seed = rollout.max_response_tokens, seed
        self.stop_token_ids = inputs.stop_token_ids
        self.replica = rank // tp_size
        self.num_replicas = dist.get_world_size() // tp_size
        self.keeps_rollouts = rank % tp_size == 0
        """On the first rank of a replica, which alone keeps what it samples."""
        arguments = engine_arguments(
            hf_path,
            rollout,
            max_model_len(inputs.shape, rollout),
            dtype=dtype,
            seed=seed,
            offload=offload,
            on_cpu=current_platform.is_cpu(),
            returns_routes=returns_routes,
            adapters=adapters,
        )
        check_sampled(hf_path, inputs.shape)
        self.policy_version: int | None = None
        """Version of the engine's weights; None: there are none to sample from."""
        run_name = name_run()
        adapt_vllm(rank, run_name)
        self._llm = _build(hf_path, arguments, returns_routes=returns_routes)
        self._returns_routes = returns_routes and self.keeps_rollouts
        self._adapter: Adapter | None = None
        if adapters is not None:
            self._adapter = Adapter(
                self._llm, inputs.shape, adapters, hf_path, getattr(torch, dtype)
            )
        self.has_weights = False
        """Whether its weights are a policy's; asleep it has none."""
        # At interpreter exit the process groups that it destroys may already be gone.
        reach(self._llm, FINALIZER).atexit = False
        unlink_shared_memory(run_name, self.replica * tp_size, tp_size)
        self.at_once = rollout.max_num_sequences
        """Responses that a replica samples concurrently."""
        self._store = store.own_connection() if rollout.shared_queue else None
        self._closed = False
        self._asleep: set[str] = set()

    def sleep(self) -> None:
        """Drop weights and KV cache from the GPU; `run` then refuses every version.

        Every rank of a replica calls this. Waking maps weights and cache at the same addresses, so
        CUDA graphs and tensors from `live_weights` stay valid. On a CPU no memory is freed.
        """
        if "weights" not in self._asleep:
            self.policy_version, self.has_weights = None, False
            self._llm.sleep(level=2)
            self._asleep = {"weights", "kv_cache"}

    def _wake(self, *parts: str) -> None:
        """Allocate dropped memory again; contents are undefined until reloaded."""
        for part in parts:
            if part in self._asleep:
                self._llm.wake_up(tags=[part])
                self._asleep.remove(part)

    def live_weights(self) -> dict[str, LiveWeight]:
        """Return every weight of this rank's shard by vLLM's name, in place.

        Matrices of an adapter that is synced apart are among them, whole.
        """
        found = live_weights(self._model())
        return found if self._adapter is None else found | self._adapter.live()

    @contextlib.contextmanager
    def weights_replaced(self, policy_version: int) -> Iterator[None]:
        """Let the body overwrite all live weights; it may communicate.

        Afterwards `run` accepts only this version, and nothing computed with older weights is
        left. After an error in the body it accepts none.
        """
        self.policy_version = None
        self._wake("weights")
        yield
        if self._adapter is not None:
            self._adapter.install()
        self._forget_prefixes()
        self.policy_version, self.has_weights = policy_version, True

    def load_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int
    ) -> None:
        """Replace the weights with those of a Hugging Face directory.

        Args:
            named_tensors: (Hugging Face name, full tensor); the same in the same order on every
                rank of the replica, which keeps its shard. Fully consumed: it may communicate.
            policy_version: see weights_replaced.

        Raises:
            RuntimeError: a parameter is missing or given twice; the engine then refuses to sample.
        """
        with self.weights_replaced(policy_version):
            load_hf_tensors(self._model(), named_tensors)

    def run(
        self,
        work: Work,
        sampling: SamplingSettings,
        policy_version: int,
        on_progress: Callable[[int, int], None] | None = None,
        has_time: Callable[[], bool] | None = None,
    ) -> list[Rollout]:
        """Sample responses, new ones or started ones, until there are no more or it is enough.

        Log-probabilities are of the distribution that was sampled from, with temperature, top-p and
        top-k. Keys and values of tokens that a response has are computed with the engine's weights.

        Args:
            work: what to sample; no two responses have one seed.
            sampling: temperature and limits.
            policy_version: must be the engine's.
            on_progress: called with (finished, all) of this replica's responses as they finish.
            has_time: checked periodically; None: there always is.

        Returns:
            Those that are interrupted, with what has been sampled of them.

        Raises:
            RuntimeError: the engine has other weights.
            Stopped: on all ranks of the replica: one of them has no time left; what has been
                sampled is dropped.
        """
        self._prepare(sampling, policy_version)
        with_routes = self._returns_routes and sampling.seed_role == "train"
        held: dict[int, Rollout] = {}

        def asked(requests: Iterable[Request]) -> list[Asked]:
            found = list[Asked]()
            for one in requests:
                # The seed doubles as vLLM's request id.
                assert one.seed not in held, "two responses have one seed"
                held[one.seed] = one.rollout
                parameters = request(sampling, self.stop_token_ids, one)
                found.append((one.seed, one.rollout.sequence.tolist(), parameters))
            return found

        def keep(seed: int, completion: Any) -> None:
            started = held.pop(seed)
            # Any other reason: vLLM aborted it.
            if completion.finish_reason in ("length", "stop"):
                work.ended(self._ended(started, completion, with_routes=with_routes))

        with random_state_kept():
            again = work.waiting
            waits = (again.number, lambda is_idle: asked(again.back(is_idle))) if again else ()
            interrupted = complete(
                self._llm.llm_engine, lambda room: asked(work.take(room)), keep, on_progress,
                has_time, work.is_enough, *waits, at_once=self.at_once, expected=work.expected,
                lora_request=None if self._adapter is None else self._adapter.request,
            )  # fmt: skip
        return [
            held[seed].extended(
                *sampled(completion), policy_version, truncated=False,
                routes=routes_of(completion) if with_routes else None,
            )
            for seed, completion in interrupted.items()
        ]  # fmt: skip

    def count(self, key: str, number: int) -> int:
        """Add to a number that all replicas share, once for this one; return the sum."""
        assert self._store is not None, "rollout.shared_queue is off"
        return added(self._store, key, number)

    def told(self, value: T) -> T:
        """Return what the replica's first rank has, on all its ranks; all call it alike."""
        return told(value)

    def _prepare(self, sampling: SamplingSettings, policy_version: int) -> None:
        """Check the request, and start with an empty KV cache. Raises RuntimeError: see run."""
        if policy_version != self.policy_version:
            raise RuntimeError(
                f"asked for policy version {policy_version}, but the engine holds "
                f"{self.policy_version}"
            )
        limit = self._max_response_tokens
        assert sampling.max_response_tokens <= limit, f"{sampling} exceeds the limit {limit}"
        self._wake("kv_cache")
        # A resumed run has no cached prefixes either, and must sample the same.
        self._forget_prefixes()

    def shutdown(self) -> None:
        """Free vLLM's memory; the trainer's process groups stay. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self.policy_version = None
            # vLLM unmaps what it frees, even while it sleeps and nothing is mapped.
            self._wake("weights", "kv_cache")
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm

    def _model(self) -> Any:
        """The module whose parameters are updated in place."""
        return reach(self._llm, MODEL)

    def _forget_prefixes(self) -> None:
        """Drop cached keys and values, which belong to older weights."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM's prefix cache is in use between two calls of run")

    def _ended(self, started: Rollout, completion: Any, *, with_routes: bool) -> Rollout:
        """Return a response that vLLM has finished, from what there was of it before."""
        token_ids, logprobs = sampled(completion)
        truncated = not token_ids or token_ids[-1] not in self.stop_token_ids
        assert not token_ids or completion.finish_reason == ("length" if truncated else "stop"), (
            f"a response ending in {token_ids[-1]} finished with {completion.finish_reason}"
        )
        assert self.policy_version is not None
        routes = routes_of(completion) if with_routes else None
        return started.extended(
            token_ids, logprobs, self.policy_version, truncated=truncated, routes=routes
        )


def _build(hf_path: str, arguments: dict[str, Any], *, returns_routes: bool) -> LLM:
    """Build vLLM's engine. Raises ConfigError: see RolloutEngine."""
    if returns_routes:
        check_imports(ROUTES)
        # Imported here: other runs do not need its names of vLLM.
        from vapo_megatron.rollout.vllm.returned_routes import allow_on_cpu, collect

        allow_on_cpu()
    with process_state_kept(), random_state_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            llm = LLM(**arguments)
        # Not implemented: such as FP8 keys and values on a CPU without AVX-512.
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(
                f"vLLM cannot serve model.hf_path={hf_path} with these rollout settings: "
                f"{' '.join(str(error).split())}"
            ) from error
    check_built(llm)
    if returns_routes:
        check_built(llm, BUILT_FOR_ROUTES)
        collect(llm)
    return llm
