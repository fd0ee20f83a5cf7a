"""The experts that vLLM's routers chose, returned with each completion.

vLLM keeps a token's routes beside its keys and values, so that a cached prefix has them too, and
returns those of all tokens of a request that were read: prompt and response but for the last one.
Two things of it are mended here:

- Its runner for a CPU does not call the connector that collects routes; `collect` does.
- Of a replica's ranks only the first collects any, but each has a scheduler here, which would miss
  them.

Imported by engine.py alone, once vLLM may be imported.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import vllm.config
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from vapo_megatron.rollout.vllm.interface import RUNNER, SCHEDULER_ROUTES, reach


def allow_on_cpu() -> None:
    """Let an engine that is built next return routes with vLLM's runner for a CPU too.

    Its check refuses every runner but the one for GPUs, and what engine_arguments and
    config/vllm_args.py rule out.
    """
    if current_platform.is_cpu():
        vllm.config.VllmConfig._verify_aux_output_compatibility = (  # type: ignore[method-assign]
            lambda self: None
        )


def collect(llm: Any) -> None:
    """Make a built engine, whose arguments ask for it, return routes on this rank's platform."""
    if current_platform.is_cpu():
        _collect_on_cpu(reach(llm, RUNNER))
    if not get_tp_group().is_first_rank:
        reach(llm, SCHEDULER_ROUTES).take_output = lambda request, output: None


def _collect_on_cpu(runner: Any) -> None:
    """Call vLLM's connector around each step of a runner, as the runner for GPUs does."""
    connector = AuxOutputWorkerConnector(
        vllm_config=runner.vllm_config, model=runner.model, kv_cache_config=runner.kv_cache_config
    )
    execute, sample = runner.execute_model, runner.sample_tokens
    scheduled: dict[str, int] = {}
    """Tokens of each request in the step that is being computed."""

    def execute_model(scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        scheduled.clear()
        scheduled.update(scheduler_output.num_scheduled_tokens)
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute(scheduler_output, intermediate_tensors)

    def sample_tokens(grammar_output: Any) -> Any:
        # Still in the order of the step's rows: only the next step changes it.
        batch, count = runner.input_batch, len(scheduled)
        names = list(batch.req_ids[:count])
        pending = connector.prepare_output(
            SimpleNamespace(  # type: ignore[arg-type]
                req_ids=names,
                query_start_loc_np=np.cumsum([0, *(scheduled[name] for name in names)]),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
            )
        )
        output = sample(grammar_output)
        if pending is not None and output is not None:
            places = output.req_id_to_index
            drawn = [len(output.sampled_token_ids[places[name]]) for name in names]
            pending.enqueue_cpu_copy(np.array(drawn), np.zeros(count, np.int64))
            output.aux_output_connector_output = pending.process_output()
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
