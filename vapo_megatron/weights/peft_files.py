"""The files of a PEFT directory: adapter_config.json, and adapter_model.safetensors with A and B.

peft.py fills them, and reads them, where the adapters are on several ranks.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from vapo_megatron.config.lora import TARGETS, LoraConfig
from vapo_megatron.errors import CheckpointError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.weights.adapter_table import adapter_tensors, target_of, targets_of
from vapo_megatron.weights.convert.sharded_files import is_distributed_checkpoint
from vapo_megatron.weights.hf_reader import DTYPES, HfReader

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
BASE_FILE = "base.json"
"""Of ours: the directory of the base model, and a digest of it."""
_SAMPLED = 256
PREFIX = "base_model.model."
"""Before the names of matrices in a file."""
_PLAIN = {
    "use_dora": False, "use_rslora": False, "fan_in_fan_out": False, "bias": "none",
    "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "layers_to_transform": None,
    "lora_bias": False, "target_parameters": None, "trainable_token_indices": None,
    "layer_replication": None, "use_qalora": False, "velora_config": None,
    "alora_invocation_tokens": None, "monteclora_config": None, "use_bdlora": None,
    "arrow_config": None, "kasa_config": None,
}  # fmt: skip
"""Settings of PEFT that change what an adapter computes or has, and their value without effect."""
_BASE_KEPT = (True, False, None, "gaussian", "orthogonal", "eva")
"""init_lora_weights with which the base model keeps its weights; PEFT changes them with others,
such as pissa, before it adds B A."""
_MERGE = "merge that adapter into its model with peft, and give the result as model.hf_path"


def read_peft_config(directory: str | Path) -> dict[str, Any]:
    """Read adapter_config.json, and refuse what is more than A and B of linear layers.

    Raises:
        CheckpointError: it is missing or damaged, or has a setting that changes what is computed.
    """
    file = Path(directory, CONFIG_FILE)
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise CheckpointError(f"{file} {why}; give a directory that peft has saved") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: peft_type must be LORA; give a LoRA adapter")
    for name, plain in _PLAIN.items():
        if config.get(name, plain) not in (plain, None, [], {}):
            raise CheckpointError(
                f"{file}: {name}={config[name]!r} is not supported, only {plain!r}; {_MERGE}"
            )
    if (begun := config.get("init_lora_weights")) not in _BASE_KEPT:
        raise CheckpointError(
            f"{file}: init_lora_weights={begun!r} is not supported: peft changes the base model's "
            f"weights with it; {_MERGE}"
        )
    return config


def check_adapters(
    directory: str | Path, shape: ModelShape, lora: LoraConfig, base: str | Path
) -> None:
    """Check from config and header that load_adapters can load a PEFT directory.

    Args:
        base: model.hf_path.

    Raises:
        CheckpointError: names the file, what was expected and what was found.
    """
    config = read_peft_config(directory)
    asked = {"r": lora.rank, "lora_alpha": lora.alpha}
    for name, value in asked.items():
        if config.get(name) != value:
            field = {"r": "rank", "lora_alpha": "alpha"}[name]
            raise CheckpointError(
                f"model.lora.path={directory}: its {name} is {config.get(name)}, which "
                f"model.lora.{field}={value:g} must equal; set {field}={config.get(name)}"
            )
    _check_base(directory, base)
    reader, targets = HfReader(directory, WEIGHTS_FILE), targets_of(shape, lora)
    expected = {PREFIX + n: s for n, s in wanted_tensors(shape, lora).items()}
    present = set(reader.names())
    found = sorted({target_of(name) for name in present})
    if other := [target for target in found if target not in TARGETS]:
        raise CheckpointError(
            f"model.lora.path={directory} has adapters of {', '.join(other)}, which are none of "
            f"{', '.join(TARGETS)}; {_MERGE}"
        )
    if found != sorted(targets):
        raise CheckpointError(
            f"model.lora.path={directory} has adapters of {', '.join(found)}, and "
            f"model.lora.targets asks for {', '.join(targets)}; set targets=[{', '.join(found)}]"
        )
    for name, size in expected.items():
        if name not in present or reader.shape(name) != size or reader.dtype(name) not in DTYPES:
            what = f"{list(reader.shape(name))} {reader.dtype(name)}" if name in present else "none"
            raise CheckpointError(
                f"model.lora.path={directory}: {name}: expected {list(size)}, found {what}: it is "
                "of another base model; give adapters of model.hf_path"
            )
    if extra := sorted(present - set(expected)):
        raise CheckpointError(
            f"model.lora.path={directory}: {extra[0]} is unknown: it is of another base model; "
            "give adapters of model.hf_path"
        )


def wanted_tensors(shape: ModelShape, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the matrices of all targets."""
    targets = targets_of(shape, lora)
    found = adapter_tensors(shape, lora).items()
    return {name: size for name, size in found if target_of(name) in targets}


def peft_config(shape: ModelShape, lora: LoraConfig, base: str | Path) -> dict[str, Any]:
    """Return what peft and vLLM read in adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets_of(shape, lora)),
        "bias": "none",
        "inference_mode": True,
    }


def write_peft_config(
    directory: Path, shape: ModelShape, lora: LoraConfig, base: str | Path
) -> None:
    """Write adapter_config.json, and which weights the adapters are of.

    Args:
        base: the base model's directory, which adapter_config.json names.
    """
    text = json.dumps(peft_config(shape, lora, base), indent=2)
    (directory / CONFIG_FILE).write_text(text + "\n")
    noted = {"directory": str(base), "digest": base_digest(base)}
    (directory / BASE_FILE).write_text(json.dumps(noted) + "\n")


def base_digest(directory: str | Path) -> str | None:
    """Return a digest that other weights of the same sizes do not have; None: of no HF directory.

    Of the names, shapes and types of some hundred tensors, and of their first rows.
    """
    if is_distributed_checkpoint(directory):
        return None
    reader, digest = HfReader(directory), hashlib.sha256()
    names = sorted(reader.names())
    for name in names[:: max(1, len(names) // _SAMPLED)]:
        row = reader.read(name, 0, 0, 1).contiguous()
        digest.update(f"{name} {reader.shape(name)} {reader.dtype(name)}".encode())
        digest.update(row.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check_base(directory: str | Path, base: str | Path) -> None:
    """Refuse adapters that were trained on other weights, where that is known."""
    try:
        known = json.loads(Path(directory, BASE_FILE).read_bytes())
        before = str(known["digest"]), known["directory"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    now = base_digest(base)
    if known["digest"] is not None and now is not None and before[0] != now:
        raise CheckpointError(
            f"model.lora.path={directory} has adapters of {before[1]}, whose weights are not those "
            f"of model.hf_path={base}; set hf_path to their base model"
        )
