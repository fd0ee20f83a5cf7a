"""PEFT directories for a tiny model, written by peft itself, and the model that peft makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapters(
    base: Path | str,
    out: Path | str,
    targets: tuple[str, ...] = ALL,
    *,
    seed: int = 2,
) -> str:
    """Save random adapters, whose B is not 0."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    settings = LoraConfig(r=4, lora_alpha=6, target_modules=list(targets), init_lora_weights=False)
    get_peft_model(model, settings).save_pretrained(out)
    return str(out)


def lora_fields(directory: Path | str) -> dict[str, Any]:
    """model.lora of a PEFT directory."""
    from vapo_megatron.weights.peft_files import read_peft_config

    config = read_peft_config(directory)
    return {
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "targets": sorted(config["target_modules"]),
        "path": str(directory),
    }


def load_with_peft(base: Path | str, directory: Path | str) -> Any:
    """transformers' model in float32 with peft's adapters."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, directory)


@torch.no_grad()
def logprobs_of(model: Any, prompt: Any, tokens: Any) -> torch.Tensor:
    """The log-probability of each response token, float32."""
    ids = torch.tensor([*prompt, *tokens])
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
