"""Which Hugging Face directory a checkpoint on the command line stands for."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from vapo_megatron.config.missing import missing_model
from vapo_megatron.errors import CheckpointError
from vapo_megatron.run.checkpoint.files import STATE, candidates
from vapo_megatron.run.directory import read_config
from vapo_megatron.weights.hf_directory import exported_step


def is_run_directory(checkpoint: Path) -> bool:
    """Whether it is a run's: it has config.yaml."""
    return (checkpoint / "config.yaml").is_file()


def find_hf_directory(checkpoint: Path) -> Path:
    """Return the HF directory of a checkpoint: itself, or a run directory's hf_export.

    Raises:
        CheckpointError: neither, or the export is older than the run's latest checkpoint; names
            the command that makes an HF directory.
    """
    if is_run_directory(checkpoint):
        return _export_of_run(checkpoint)
    if not checkpoint.exists():
        raise CheckpointError(missing_model("--checkpoint", checkpoint))
    sharded = _sharded(checkpoint)
    if sharded is not None:
        raise CheckpointError(
            f"--checkpoint={checkpoint} is a megatron-core checkpoint, and vLLM reads HF "
            f"directories; make one with {_conversion(sharded)}, and give that"
        )
    if (checkpoint / "config.json").is_file():
        return checkpoint
    raise CheckpointError(
        f"--checkpoint={checkpoint} is neither an HF directory (config.json) nor a run "
        "directory (config.yaml); give one of them"
    )


def _export_of_run(run_dir: Path) -> Path:
    export = run_dir / "hf_export"
    latest = next(iter(candidates(run_dir / "checkpoints")), None)
    has_export = (export / "config.json").is_file()
    if latest is None and not has_export:
        raise CheckpointError(
            f"--checkpoint={run_dir}: the run has neither hf_export nor a checkpoint yet; let it "
            "continue"
        )
    if latest is not None and not has_export:
        if latest.is_dir() and not (latest / "actor").is_dir():
            raise CheckpointError(
                f"--checkpoint={run_dir}: the run trains no actor; give its model.hf_path"
            )
        raise CheckpointError(
            f"--checkpoint={run_dir}: the run has no hf_export; make it with "
            f"{_conversion(latest / 'actor', export)}"
        )
    step = exported_step(export)
    if latest is not None and step is not None and (latest / "actor").is_dir():
        now = int(latest.name.removeprefix("step_"))
        if step < now:
            raise CheckpointError(
                f"--checkpoint={run_dir}: hf_export is of step {step}, but the latest checkpoint "
                f"is of step {now}; export it with "
                f"{_conversion(latest / 'actor', export, overwrite=True)}, or evaluate step {step} "
                f"with --checkpoint {export}"
            )
    return export


def date_of_run(checkpoint: Path) -> str | None:
    """Return the date in the prompts of the run that a directory is or is exported into, or None.

    Templates that ask for the date have been told it since the run's first day.
    """
    for place in (checkpoint, *checkpoint.absolute().parents[:2]):
        if is_run_directory(place):
            for step in candidates(place / "checkpoints"):
                try:
                    date = json.loads((step / STATE).read_bytes())["run"]["date"]
                    return date if date is None else str(date)
                except (OSError, ValueError, KeyError, TypeError):
                    continue
    return None


def _sharded(checkpoint: Path) -> Path | None:
    """Return the megatron-core checkpoint that a directory is or holds, None if it is none."""
    if checkpoint.name == "checkpoints" and (found := candidates(checkpoint)):
        checkpoint = found[0]
    places = (checkpoint, checkpoint / "actor")
    return next((place for place in places if (place / ".metadata").is_file()), None)


def _conversion(sharded: Path, out: Path | None = None, *, overwrite: bool = False) -> str:
    """Return the command that makes an HF directory of a megatron-core checkpoint.

    Of a run's adapters it makes a PEFT directory, which is to be merged then, and says so.

    Args:
        sharded: RUN/checkpoints/step_*/actor, or another that has its own config.json.
        out: None: beside the run's checkpoints, or the directory's name with _hf.
        overwrite: out exists.
    """
    command = ["vapo", "convert", "to-hf", "--megatron", str(sharded)]
    step = sharded.parent
    run_dir = sharded.absolute().parents[2]
    if is_run_directory(run_dir):
        model = read_config(run_dir / "config.yaml").get("model") or {}
        command += ["--hf", str(model.get("hf_path", "BASE"))]
        beside = step.parent.parent / "exports" / step.name
        if (model.get("lora") or {}).get("rank") is not None:
            adapters = shlex.join([*command, "--out", f"{beside}_adapters"])
            return f"{adapters}, merge that with peft (docs/lora.md, Files)"
        out = out or beside
    last = ["--out", str(out or f"{sharded}_hf"), *["--overwrite"] * overwrite]
    return shlex.join([*command, *last])
