"""What the fork server does where tests start vLLM: import the engine, and the first engine's work.

vLLM imports its worker, sets up every logger, and looks through all modules for what its CPU
kernels replace: 4 s of a process's first engine and 2 s of each other. Here it does so once for all
processes. Those that start by themselves (`-m slow`) do it each.
"""

import importlib

# The engine sets what vLLM reads when it is imported.
# isort: off
import vapo_megatron.rollout.vllm.engine  # noqa: F401
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging_if_needed
from vllm.platforms import current_platform
# isort: on

configure_logging_if_needed(LoggingConfig())
if current_platform.is_cpu():
    for name in (
        "distributed.elastic_ep.elastic_execute",
        "entrypoints.launchers.cli_args",
        "model_executor.layers.quantization.online.base",
        "model_executor.models.qwen2",
        "v1.core.sched.scheduler",
        "v1.worker.cpu_worker",
    ):
        importlib.import_module(f"vllm.{name}")
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda platform: None)
