"""The policy's adapter (LoRA) inside vLLM, replaced in place (rollout.adapter_sync=adapter).

The weight sync writes its matrices, whole on every rank, into buffers of ours. `install` then has
vLLM cut and scale copies of them into the one slot that every request names. Before, it takes the
older adapter out of the slot: vLLM would keep it in silence for the same number.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from vapo_megatron.config.lora import LoraConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.rollout.vllm.interface import ADAPTERS, check_built, check_imports, reach
from vapo_megatron.weights.peft_files import PREFIX, peft_config, wanted_tensors
from vapo_megatron.weights.reshard.plan import LiveWeight
from vapo_megatron.weights.reshard.vllm_layout import ADAPTER_NAME

_NUMBER = 1
_MANAGER = "llm_engine.model_executor.driver_worker.worker.model_runner.lora_manager"
BUILT = tuple(f"{_MANAGER}.{name}" for name in ("_adapter_manager", "lora_config", "vocab_size"))
"""What a built engine must have."""


def adapter_arguments(lora: LoraConfig) -> dict[str, Any]:
    """Return arguments of vllm.LLM.

    Raises:
        ConfigError: vLLM has no room for such a rank.
    """
    check_imports(ADAPTERS)
    from vllm.config.lora import MaxLoRARanks

    assert lora.rank is not None, "there are no adapters"
    room = [size for size in get_args(MaxLoRARanks) if size >= lora.rank]
    if not room:
        raise ConfigError(
            f"model.lora.rank={lora.rank} must be at most {max(get_args(MaxLoRARanks))} with "
            "rollout.adapter_sync=adapter, which is vLLM's largest; set adapter_sync=merged"
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(room)}


class Adapter:
    """The policy's adapter of one engine."""

    def __init__(
        self, llm: Any, shape: ModelShape, lora: LoraConfig, hf_path: str, dtype: torch.dtype
    ) -> None:
        """Allocate its matrices; dtype: of the engine's weights."""
        from vllm.lora.request import LoRARequest

        check_built(llm, BUILT)
        self._manager = reach(llm, _MANAGER)
        self._config = peft_config(shape, lora, hf_path)
        device = next(self._manager._adapter_manager.model.parameters()).device
        self._matrices = {
            name: torch.zeros(size, dtype=dtype, device=device)
            for name, size in wanted_tensors(shape, lora).items()
        }
        # The path is never read: the number is always in its slot.
        self.request = LoRARequest("policy", _NUMBER, hf_path)

    def live(self) -> dict[str, LiveWeight]:
        """Return the matrices, by the sync's names for them."""
        return {ADAPTER_NAME + name: LiveWeight(t, 0) for name, t in self._matrices.items()}

    def install(self) -> None:
        """Compute with the matrices as they are now. The prefix cache is the caller's to drop."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        adapters, settings = self._manager._adapter_manager, self._manager.lora_config
        # vLLM keeps what it is given, and scales B in place.
        tensors: dict[str, Tensor] = {PREFIX + n: t.clone() for n, t in self._matrices.items()}
        adapter = LoRAModel.from_lora_tensors(
            _NUMBER, tensors, PEFTHelper.from_dict(self._config),
            device=str(next(iter(tensors.values())).device), dtype=settings.lora_dtype,
            model_vocab_size=self._manager.vocab_size,
        )  # fmt: skip
        adapters.remove_adapter(_NUMBER)
        adapters.add_adapter(adapter)
        adapters.activate_adapter(_NUMBER)
