"""The directories of a run's checkpoints: names, completeness, retention, match with a config.

    latest                        name of the newest complete checkpoint, replaced atomically;
                                  step_000000: a run started from scratch, ignore the others
    step_000010/actor/, critic/   megatron-core distributed checkpoints: model, optimizer
    step_000010/state.json        step, data position, update counters, policy version
    step_000010/in_flight/        with rollout.lag or carry_over_groups: responses of later steps
    step_000010/checksums.json    SHA-256 of every other file in it, written last
    step_000010.partial           being written, or left by a run that died
    step_000005.old               being deleted

A directory is renamed to its final name once all of it is on disk, and away from it before anything
in it is deleted. Needs no megatron-core: the checks before a run use it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from vapo_megatron.config import AlgorithmConfig, VapoConfig
from vapo_megatron.config.lora import TARGETS, LoraConfig
from vapo_megatron.data.storage import replacing, sha256_of, sync
from vapo_megatron.errors import CheckpointError, tell
from vapo_megatron.parallel.reduce import gather_objects
from vapo_megatron.weights.convert.sharded_files import ShardedReader
from vapo_megatron.weights.frozen import frozen

T = TypeVar("T")
LATEST, SUMS, STATE = "latest", "checksums.json", "state.json"
CRITIC_REMEDY = "take its weights alone with model.critic_checkpoint_optimizer=false"
RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def directory_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step_{step:06d}"


def step_directories(root: Path) -> dict[int, Path]:
    """Return the checkpoints with a final name, by step, oldest first."""
    found = [(re.fullmatch(r"step_(\d{6,})", path.name), path) for path in root.glob("step_*")]
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def candidates(root: Path) -> list[Path]:
    """Return the checkpoints a run may resume from, best first: `latest` and all before it.

    Without a `latest` file: all of them. The one it names may be missing. Later ones were abandoned
    by the run, or by someone who wrote an older name into `latest`.
    """
    steps = step_directories(root)
    latest = root / LATEST
    named = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    if match := re.fullmatch(r"step_(\d{6,})", named):
        steps = {step: path for step, path in steps.items() if step <= int(match[1])}
        if int(match[1]):
            steps[int(match[1])] = root / named
    return [steps[step] for step in sorted(steps, reverse=True)]


def resumes(resume: bool) -> bool:
    """Whether a run resumes from its checkpoints; a job restarted by torchrun or Slurm always does.

    Args:
        resume: checkpoint.resume, which applies to the first start.
    """
    counts = (os.environ.get(name, "") for name in RESTART_COUNTS)
    return resume or any(count.isdecimal() and int(count) for count in counts)


def start_from_scratch(root: Path) -> None:
    """Abandon existing checkpoints, so that a restart does not resume from them either."""
    if candidates(root):
        _set_latest(root, directory_name(0))


def read_sums(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a checkpoint.

    Raises:
        ValueError: the list is missing or damaged; the message says how, in a few words.
    """
    path = directory / SUMS
    try:
        sums = json.loads(path.read_text())
    except OSError as error:
        what = f"no {SUMS}" if directory.is_dir() else "no such directory"
        raise ValueError(what if isinstance(error, FileNotFoundError) else str(error)) from None
    except ValueError as error:
        raise ValueError(f"{SUMS} is damaged: {error}") from None
    names = sums if isinstance(sums, dict) else {}
    if STATE not in names or any(Path(n).is_absolute() or ".." in Path(n).parts for n in names):
        raise ValueError(f"{SUMS} is damaged: it does not list a checkpoint's files")
    return sums


def read_state(directory: Path) -> dict[str, Any]:
    """Return the state of a complete checkpoint: step, num_updates, and `run`, given to save."""
    return json.loads((directory / STATE).read_text())


def newest_complete(root: Path, role: str | None = None) -> Path | None:
    """Find the newest complete checkpoint, and print which newer ones are damaged.

    Collective: the ranks share the reading of all files. One process without groups reads them all.

    Args:
        root: directory of a run's checkpoints.
        role: whose files are read; None: all.

    Returns:
        None: there are no checkpoints.

    Raises:
        CheckpointError: all checkpoints are damaged; nothing was changed.
    """
    damage: list[str] = []
    for directory in _of_main_rank(candidates(root)):
        problems = find_problems(directory, role)
        if not problems:
            if damage and _rank() == 0:
                tell(f"skipped damaged checkpoints: {'; '.join(damage)}; {directory} is used")
            return directory
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        damage.append(f"{directory} ({problems[0]}{more})")
    if damage:
        raise CheckpointError(
            f"all checkpoints are damaged: {'; '.join(damage)}; restore one, or start from scratch "
            "with another logging.run_dir or checkpoint.resume=false"
        )
    return None


def find_problems(directory: Path, role: str | None) -> list[str]:
    """Compare a checkpoint's files with their checksums; collective, see newest_complete.

    Returns:
        What is wrong, the same on every rank; empty if it is complete.
    """
    try:
        sums: dict[str, str] = read_sums(directory)
        problems = []
    except ValueError as error:
        sums, problems = {}, [str(error)]
    sums, problems = _of_main_rank((sums, problems))
    wanted = [name for name in sums if role is None or name.split("/")[0] in (role, STATE)]
    mine = wanted[_rank() :: dist.get_world_size() if dist.is_initialized() else 1]
    of_ranks = gather_objects(_damage(directory, {name: sums[name] for name in mine}))
    return sorted(itertools.chain(problems, *of_ranks))


def _damage(directory: Path, sums: Mapping[str, str]) -> list[str]:
    """Read files; return what is wrong with each that differs from what was written."""
    problems = []
    for name, expected in sums.items():
        try:
            found = sha256_of(directory / name)
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
            continue
        if found != expected:
            problems.append(f"{name} is damaged: its SHA-256 is not the one in {SUMS}")
    return problems


def _of_main_rank(value: T) -> T:
    """Return the main rank's value: other nodes may see a directory a moment later."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def publish(root: Path, step: int, sums: Mapping[str, str]) -> None:
    """Turn a partial checkpoint into `latest`; its other files are on disk. Raises OSError."""
    final = root / directory_name(step)
    partial = partial_directory(root, step)
    with replacing(partial / SUMS) as out:
        out.write(json.dumps(dict(sorted(sums.items())), indent=1).encode())
    for directory in {(partial / name).parent for name in sums}:
        sync(directory)
    if final.exists():  # abandoned by a run that was set back, or damaged
        final.rename(_unused_name(final))
    partial.rename(final)
    sync(root)
    _set_latest(root, final.name)


def _set_latest(root: Path, name: str) -> None:
    with replacing(root / LATEST) as out:
        out.write(name.encode())
    sync(root)


def partial_directory(root: Path, step: int) -> Path:
    """Return where a step's checkpoint is written before it gets its final name."""
    return root / f"{directory_name(step)}.partial"


def delete_unkept(root: Path, step: int, *, keep_last: int, keep_every: int) -> None:
    """Delete old checkpoints after `step` has become the latest; warns of what it cannot delete.

    Args:
        root: directory of the run's checkpoints.
        step: of the latest; later ones are of steps that are being made again.
        keep_last: checkpoints kept, this one included.
        keep_every: steps divisible by it are also kept; 0: none.
    """
    directories = step_directories(root)
    upto = [s for s in directories if s <= step]
    kept = set(upto[-keep_last:]) | {s for s in upto if keep_every and s % keep_every == 0}
    for old in directories.keys() - kept:
        with _retried_later(directories[old]):
            directories[old].rename(_unused_name(directories[old]))
    for path in root.glob("step_*.old"):
        with _retried_later(path):
            shutil.rmtree(path)


def delete_unfinished(root: Path) -> None:
    """Delete the leftovers of a run that died while writing or deleting a checkpoint."""
    for path in unfinished(root):
        shutil.rmtree(path, ignore_errors=True)


def unfinished(root: Path) -> list[Path]:
    """Return the directories that delete_unfinished deletes."""
    return [*root.glob("step_*.partial"), *root.glob("step_*.old")]


def _unused_name(directory: Path) -> Path:
    """Return an unused name for a checkpoint that will be deleted."""
    old = directory.with_name(f"{directory.name}.old")
    return _unused_name(old) if old.exists() else old


@contextlib.contextmanager
def _retried_later(directory: Path) -> Iterator[None]:
    """Only warn if the body cannot delete a directory; the next checkpoint retries."""
    try:
        yield
    except FileNotFoundError:  # another process deleted it
        pass
    except OSError as error:
        why = error.strerror or error
        tell(f"warning: {directory} cannot be deleted: {why}; the next checkpoint tries again")


def check_roles(directory: Path, held: Collection[str], trained: Collection[str]) -> None:
    """Raise a CheckpointError if a checkpoint has other roles than those the run trains."""
    if set(held) != set(trained):
        raise CheckpointError(
            f"{directory} holds {' and '.join(held)}, but this configuration trains "
            f"{' and '.join(trained)} (algorithm.stage, advantage_estimator); resume with the "
            "run's own configuration, or start another run with logging.run_dir and, for its "
            "critic, model.critic_checkpoint"
        )


def check_meaning(
    state: Mapping[str, Any], config: VapoConfig, roles: Iterable[str], *, field: str
) -> None:
    """Reject weights that would compute something else under the run's settings.

    Args:
        state: of the checkpoint.
        config: the run's.
        roles: that are loaded.
        field: that names the checkpoint, with its value.

    Raises:
        CheckpointError: names the setting, and both values.
    """
    _check_value_range(state, config.algorithm, field)
    found = state["run"].get("config", {}).get("model", {}).get("lora")
    if found is None:  # an older version's
        return
    before, now = LoraConfig.model_construct(**found), config.model.lora
    for role in roles:
        if before.of(role) and now.of(role):
            _check_adapters(before, now, role, field)


def _check_adapters(before: LoraConfig, now: LoraConfig, role: str, field: str) -> None:
    """Reject adapters of other matrices, or with another factor; their tensors show the rank."""
    differ = {
        "alpha": before.alpha != now.alpha,
        "targets": set(before.targets or TARGETS) != set(now.targets or TARGETS),
    }
    for name, does in differ.items():
        held, asked = getattr(before, name), getattr(now, name)
        if does:
            raise CheckpointError(
                f"{field}: the adapters of its {role} were trained with model.lora.{name}="
                f"{json.dumps(held)}, which model.lora.{name}={json.dumps(asked)} must equal: "
                f"they would be another {role}; set {name}={json.dumps(held)}, or use another "
                "checkpoint"
            )


def _check_value_range(state: Mapping[str, Any], algorithm: AlgorithmConfig, field: str) -> None:
    """Reject a critic whose outputs mean values in another range; see algorithm.value_range."""
    held, asked = (json.dumps(r) for r in (state["run"].get("value_range"), algorithm.value_range))
    if held != asked:
        raise CheckpointError(
            f"{field}: its critic was trained with algorithm.value_range={held}, which "
            f"algorithm.value_range={asked} must equal: the same output would be another value; "
            f"set value_range={held}, or use another checkpoint"
        )


def check_optimizer(
    directory: Path, role: str, config: VapoConfig, *, field: str, remedy: str = CRITIC_REMEDY
) -> None:
    """Reject the state of another kind of optimizer than the configuration asks for.

    The distributed optimizer has main parameters for every dtype, the other one only for bfloat16,
    each under its own name.

    Args:
        directory: of the role's distributed checkpoint.
        role: whose optimizer it is.
        config: the run's.
        field: that names the checkpoint, with its value.
        remedy: in place of the settings of the run that wrote it.

    Raises:
        CheckpointError: names the settings on which the state depends.
    """
    keys = [key for key in ShardedReader(directory).tensors if key.startswith("optimizer.state.")]
    kinds = {key.split(".")[2] for key in keys}
    found = "dion" if "basis" in kinds else "muon" if "momentum" in kinds else "adamw"
    method = config.optimizer.method(role)
    if found != method:
        raise CheckpointError(
            f"{field}: the state of its {role}'s optimizer is that of {found}, and this run has "
            f"optimizer.{role}_method={method}; set it to {found}, or {remedy}"
        )
    dtype = config.model.dtype
    is_distributed = config.parallel.use_distributed_optimizer and method == "adamw"
    has_main = dtype == "bfloat16" and not is_distributed
    learns_attention = any(".self_attention.linear_proj." in k or ".o_proj." in k for k in keys)
    has_experts = any(".experts." in k for k in keys)
    learns_routers = any(".router." in k for k in keys)
    kept = frozen(config.algorithm, config.model, role)
    leaves_out = learns_attention == kept.attention or (
        has_experts and learns_routers == kept.routers
    )
    if (
        ("param" in kinds) != is_distributed
        or ("fp32_param" in kinds) != has_main
        # Adapters are all that is trained, whatever is frozen besides.
        or (leaves_out and not config.model.lora.of(role))
    ):
        of_router = f", model.freeze_router={kept.routers}" if has_experts else ""
        raise CheckpointError(
            f"{field}: the state of its {role}'s optimizer does not fit this run's "
            f"parallel.use_distributed_optimizer={is_distributed}, model.dtype={dtype} and "
            f"algorithm.freeze_critic_attention={kept.attention}{of_router}; use "
            f"the settings of the run that wrote it, or {remedy}"
        )
