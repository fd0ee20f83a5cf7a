"""What to say of a path that does not exist: an id of the Hugging Face hub, `~`, or a slip."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ADDRESS = re.compile(r"^(hf://|(https?://)?(www\.)?(huggingface\.co|hf\.co)/)(models/|datasets/)?")
_BELOW = re.compile(r"(/(tree|blob|resolve)/.*|/)$")
_ID = re.compile(r"[A-Za-z0-9][\w-]*/[\w-][\w.-]*")
_FILES = (".jsonl", ".json", ".csv", ".parquet", ".safetensors", ".yaml", ".txt", ".gz")
_FOLDERS = ("models", "model", "data", "downloads", "runs", "checkpoints", "output", "outputs")
"""First parts of relative paths that are no owner on the hub."""
_OWNERS = {"Qwen": "Qwen", "Llama-": "meta-llama", "Meta-Llama-": "meta-llama"}
"""By how a model's name begins."""


def hub_id(path: str | Path) -> str | None:
    """Return OWNER/NAME if a path is an id or address on the hub and nothing here; else None."""
    # As a Path it has lost one of its slashes.
    text = re.sub(r"^(https?|hf):/(?=[^/])", r"\1://", str(path))
    bare = _BELOW.sub("", _ADDRESS.sub("", text))
    if not _ID.fullmatch(bare) or bare.endswith(_FILES) or os.path.exists(path):
        return None
    is_local = bare == text and (bare.split("/")[0] in _FOLDERS or Path(text).parent.exists())
    return None if is_local else bare


def missing_model(field: str, path: str | Path) -> str:
    """Return the message that a model's directory does not exist; field: which names it."""
    name = Path(path).name
    if (found := hub_id(path)) is not None:
        local = f"models/{found.split('/')[1]}"
        return (
            f"{field}={path} is a name on the Hugging Face hub, not a directory here; run `hf "
            f"download {found} --local-dir {local}` and set {field}={local}"
        )
    owner = next((o for start, o in _OWNERS.items() if name.startswith(start)), None)
    remedy = f", or run `hf download {owner}/{name} --local-dir {path}`" if owner else ""
    return _missing(field, path) + remedy


def missing_data(field: str, path: str | Path) -> str:
    """Return the message that a file of problems does not exist; field: which names it."""
    if (found := hub_id(path)) is None:
        return _missing(field, path)
    local = f"data/{found.split('/')[1]}.parquet"
    return (
        f"{field}={path} is a name on the Hugging Face hub, not a file here; run `vapo prepare "
        f"--data {found} --tokenizer MODEL --out {local}` and set {field}={local}"
    )


def _missing(field: str, path: str | Path) -> str:
    if str(path).startswith("~"):
        return (
            f"{field}={path} does not exist: ~ is not expanded here; set {field}="
            f"{os.path.expanduser(path)}"
        )
    return f"{field}={path} does not exist; set {field} to an existing path"
