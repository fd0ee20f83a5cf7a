"""vLLM with the weights of an HF directory, in this process or on all of torchrun's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from vapo_megatron.cli.sampling.inputs import Evaluation
from vapo_megatron.config import VapoConfig
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.environment import check_processes
from vapo_megatron.weights.hf_reader import HfReader

VERSION = 0
"""Of vLLM's weights, which never change here."""


@contextlib.contextmanager
def distributed(config: VapoConfig) -> Iterator[contextlib.ExitStack]:
    """Be one of torchrun's processes, or the only one; yield what ends with that. Collective."""
    check_processes(config.parallel.world_size, config.rollout.num_processes)
    backend.initialize_distributed(config.parallel.timeout_seconds)
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        yield stack


def build_engine(evaluation: Evaluation, config: VapoConfig) -> Any:
    """Build vLLM with the directory's weights; each rank reads all and keeps its shard."""
    # Imported late, so that mistakes are reported before megatron-core and vLLM load.
    from vapo_megatron.parallel.offload import is_on
    from vapo_megatron.rollout.vllm.engine import RolloutEngine

    hf_path = evaluation.hf_path
    reader = HfReader(hf_path)
    engine = RolloutEngine(
        str(hf_path), evaluation.inputs, config.rollout,
        dtype=config.rollout.dtype or config.model.dtype, seed=config.seed,
        offload=is_on(config.parallel),
    )  # fmt: skip
    engine.load_weights(((name, reader.read(name)) for name in reader.names()), VERSION)
    return engine
