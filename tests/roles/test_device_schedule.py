"""Turns of real models with a source that records when it leaves; host bytes; replays with turns.

Not exercised: a GPU's memory. vLLM's part is in tests/rollout/vllm/test_engine.py, runs that sample
are in tests/e2e/test_offload.py.
"""

import contextlib
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.dumped import MODEL, dump
from tests.dumped import config as of_replay
from tests.weights.tiny_hf import write_tiny_hf, write_tiny_reward_model
from tests.whole_run import measured
from vapo_megatron.config import CheckpointConfig, VapoConfig
from vapo_megatron.config.phases import PHASES
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel import groups
from vapo_megatron.planning.host_memory import HostBytes, host_bytes
from vapo_megatron.roles.actor import Actor, Reference
from vapo_megatron.roles.critic import Critic
from vapo_megatron.roles.device_schedule import DeviceSchedule
from vapo_megatron.roles.reward_model import RewardModel
from vapo_megatron.run.checkpoint.writer import CheckpointWriter
from vapo_megatron.training import build
from vapo_megatron.training.loop import VapoTrainer

ROLES = ("actor", "critic", "reference", "reward_model")


def written(directory, **sizes):
    """Write a model, and beside it a reward model that is smaller; return the first."""
    write_tiny_reward_model(directory / "reward", **{**sizes, "ffn": 32})
    return write_tiny_hf(directory / "actor", **sizes)


def config(hf, offload=True, dtype="bfloat16", **parallel):
    return VapoConfig.model_validate(
        {
            "model": {
                "hf_path": str(hf),
                "dtype": dtype,
                "make_vocab_size_divisible_by": 16,
                "reward_hf_path": str(hf.parent / "reward"),
            },
            "parallel": {"offload": offload, **parallel},
            # With every kind of model: one that learns, in part, and not at all, of its own size.
            "algorithm": {"kl_coef": 0.1, "freeze_critic_attention": True},
        }
    )


class Source:
    """Counts how often it was told to leave."""

    left = 0

    def leave_device(self):
        self.left += 1


def built(hf, settings):
    place, shape = groups.initialize(settings.parallel), read_model_shape(hf)
    source = Source()
    turns = DeviceSchedule(source.leave_device, is_on=bool(settings.parallel.offload))
    assert source.left == int(turns.is_on), "it leaves before the models come"
    models = {
        "actor": Actor(shape, settings, place, str(hf)),
        "critic": Critic(shape, settings, place, str(hf)),
        "reference": Reference(shape, settings, place),
        "reward_model": RewardModel(read_model_shape(hf.parent / "reward"), settings, place),
    }
    for role, model in models.items():
        turns.join(role, model.placed)
    return turns, source, models


def there(model):
    """What of a role is on the device."""
    offload = model.placed._offload
    return "training" if offload is None else offload.held


def phases(hf, offload):
    turns, source, models = built(hf, config(hf, offload))
    found, left = {}, source.left
    for phase in PHASES:
        with turns(phase):
            found[phase] = [there(models[role]) for role in ROLES], source.left - left
        left = source.left
    assert [there(models[role]) for role in ROLES] == ["nothing" if offload else "training"] * 4
    turns.close()
    return found


def test_each_phase_has_what_it_needs_and_no_more(workers, tmp_path):
    hf = written(tmp_path, **MODEL)
    (found,) = workers.run(1, phases, hf, True)
    away = {
        "reward_scores": ["nothing", "nothing", "nothing", "parameters"],
        "values": ["nothing", "parameters", "nothing", "nothing"],
        "logprobs": ["parameters", "nothing", "nothing", "nothing"],
        "reference_logprobs": ["nothing", "nothing", "parameters", "nothing"],
        "critic_update": ["nothing", "training", "nothing", "nothing"],
        "actor_update": ["training", "nothing", "nothing", "nothing"],
        "sync": ["parameters", "nothing", "nothing", "nothing"],
        "checkpoint": ["nothing", "nothing", "nothing", "nothing"],
        "export": ["parameters", "nothing", "nothing", "nothing"],
    }
    assert set(away) <= set(found)
    for phase, (roles, left) in found.items():
        assert roles == away.get(phase, ["nothing"] * 4), phase
        assert left == (phase in away), phase


def test_without_offload_all_stay(workers, tmp_path):
    hf = written(tmp_path, **MODEL)
    (found,) = workers.run(1, phases, hf, False)
    assert set(map(str, found.values())) == {str((["training"] * 4, 0))}
    (default,) = workers.run(1, phases, hf, None)
    assert default == found, "null: off without a GPU"


def predicted(hf, settings, place):
    """Bytes in this process's host memory where checkpoints are copied, and where they are not."""
    where = {
        "pp_rank": place.pp_rank, "is_first_replica": place.dp_rank == 0, "keeps_rollouts": True,
    }  # fmt: skip
    return [
        host_bytes(
            read_model_shape(hf),
            settings.model_copy(update={"checkpoint": CheckpointConfig(asynchronous=copies)}),
            is_offloaded=True,
            **where,
        )
        for copies in (True, False)
    ]


def kept(hf, parallel, dtype, root):
    """Predicted bytes; real ones: offloaded, of a checkpoint's copy, gathered of a role for it."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    settings = config(hf, dtype=dtype, world_size=2, **parallel)
    turns, _, models = built(hf, settings)
    offloaded = sum(model.placed._offload.num_bytes for model in models.values())
    copied, gathered = [], [0]
    write, gather = CheckpointWriter._write, DistributedOptimizer.get_parameter_state_dp_zero

    def see_copies(writer, files):
        chunks = [c for content in files.values() if isinstance(content, list) for c in content]
        storages = [tensor.untyped_storage() for _, tensor in chunks]
        copied.append(sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
        write(writer, files)

    def see_gathered(*arguments, **options):
        found = gather(*arguments, **options)
        buffers = [
            t for name, b in found.items() if name != "buckets_coalesced" for t in b.values()
        ]
        tensors = [t for of_buffer in buffers for t in of_buffer.values() if torch.is_tensor(t)]
        gathered.append(sum(t.nbytes for t in tensors))
        return found

    seen = mock.patch.multiple(CheckpointWriter, _write=see_copies)
    with seen, mock.patch.object(
        DistributedOptimizer, "get_parameter_state_dp_zero", see_gathered
    ), CheckpointWriter(root, CheckpointConfig()) as writer:  # fmt: skip
        writer.save(1, {role: models[role].trained for role in ("actor", "critic")}, {})
        real = HostBytes(offloaded, sum(copied), 0)
    turns.close()
    return predicted(hf, settings, models["actor"].ranks), real, max(gathered)


@pytest.mark.parametrize(
    "dtype,parallel",
    [
        ("bfloat16", {"tensor_model_parallel_size": 2, "use_distributed_optimizer": False}),
        ("float32", {"pipeline_model_parallel_size": 2}),
        ("bfloat16", {}),
    ],
    ids=["TP2", "PP2 distributed", "DP2 distributed"],
)
def test_host_bytes_are_known_beforehand(workers, tmp_path, dtype, parallel):
    hf = written(tmp_path, num_layers=2, hidden=64, heads=2, kv_heads=2, ffn=96, vocab=300)
    found = workers.run(2, kept, hf, parallel, dtype, tmp_path / "checkpoints")
    for rank, ((copying, waiting), real, gathered) in enumerate(found):
        is_first = rank == 0 or len(parallel) > 0
        if parallel.get("use_distributed_optimizer", True):
            # A rank's part of the buffers ends where parameters or their padding do.
            assert 0.98 * copying.offloaded <= real.offloaded <= copying.offloaded
            assert waiting.checkpoint == pytest.approx(gathered, rel=0.02)
            assert gathered > 0
        else:
            assert real.offloaded == copying.offloaded
            assert gathered == waiting.checkpoint == 0
        # Norms, which both tensor-parallel ranks have, are the first one's to write.
        assert is_first == (real.checkpoint > 0)
        expected = real.checkpoint if is_first else gathered
        assert copying.checkpoint == pytest.approx(expected, rel=0.02)
        assert waiting.offloaded == copying.offloaded


def refused(hf, run_dir, parallel):
    dist.destroy_process_group()
    settings, source = config(hf, host_memory_gb=1e-4, **parallel), Source()
    built = mock.patch("vapo_megatron.training.build.Actor", side_effect=AssertionError("built"))
    sampler = mock.patch.object(VapoTrainer, "_source", lambda *_: source)
    logging = settings.logging.model_copy(update={"run_dir": str(run_dir)})
    with built, sampler, pytest.raises(ConfigError) as error:
        VapoTrainer(settings.model_copy(update={"logging": logging}))
    assert source.left == 1, "what it keeps on the host while it is away counts"
    needed = predicted(hf, settings, groups.current())[0]
    groups.destroy()
    dist.destroy_process_group()
    return str(error.value), needed


@pytest.mark.parametrize(
    "parallel",
    [{}, {"world_size": 2, "pipeline_model_parallel_size": 2}, {"world_size": 2}],
    ids=["one process", "PP2", "DP2"],
)
def test_a_node_without_the_memory_is_refused_before_the_models_are_built(
    workers, tmp_path, parallel
):
    hf = written(tmp_path, **MODEL)
    size, given = parallel.get("world_size", 1), (hf, tmp_path / "run", parallel)
    messages, of_ranks = zip(*workers.run(size, refused, *given), strict=True)
    assert len(set(messages)) == 1 and len(set(of_ranks)) == size, "each holds something else"
    message, needed = messages[0], HostBytes(*map(sum, zip(*of_ranks)))
    assert f"this run needs {needed.total / 1e9:.3g} GB of host memory on the node of" in message
    purposes = ("what is offloaded", "a checkpoint", "a step's responses")
    *shown, staged = needed
    assert staged == 0, "a trainer holds no versions for vLLM"
    parts = ", ".join(f"{n / 1e9:.3g} for {what}" for n, what in zip(shown, purposes, strict=True))
    assert f"({parts}), but 0.0001 GB are allowed by parallel.host_memory_gb" in message
    remedies = "checkpoint.asynchronous=false or parallel.offload=false or a smaller"
    assert message.endswith(f"or set {remedies} algorithm.responses_per_step")


def replayed(hf, dumped, run_dir, offload, steps, every_steps=1):
    """A whole run from a dump; a worker's function, in a world of the test's."""
    size = dist.get_world_size()
    dist.destroy_process_group()
    # The rates warm up over updates: a resumed run must know how many there were.
    settings = of_replay(
        hf,
        parallel={"world_size": size, "offload": offload},
        algorithm={
            "policy_steps": steps,
            "value_pretraining_steps": 1,
            "kl_coef": 0.1,
            "sampler_correction": "icepop",
            "value_range": [-2.0, 2.0],
            "freeze_critic_attention": True,
        },
        optimizer={"actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2},
        logging={"run_dir": str(run_dir), "tensorboard": False, "progress": "off"},
        checkpoint={"every_steps": every_steps},
    )
    with VapoTrainer(settings, dumped) as trainer:
        trainer.fit()


@pytest.mark.slow
def test_a_run_by_turns_is_the_run_without_bit_by_bit(workers, tmp_path):
    hf = write_tiny_hf(tmp_path / "model", **MODEL)
    workers.run(2, dump, tmp_path / "replay", [1, 2, 3], 2)
    paths = hf, tmp_path / "replay"
    workers.run(2, replayed, *paths, tmp_path / "all", False, 2)
    # Stopped after two steps, and gone on from their checkpoint.
    workers.run(2, replayed, *paths, tmp_path / "turns", True, 1)
    workers.run(2, replayed, *paths, tmp_path / "turns", True, 2)
    expected, found = measured(tmp_path / "all"), measured(tmp_path / "turns")
    assert [row["step"] for row in expected] == [0, 1, 2, 3]
    assert found == expected and expected[-1]["actor/grad_norm"] > 0
    # The second mini-batch of the actor's first step sees a policy that has moved.
    assert all(row["actor/reference_kl"] > 0 for row in expected[2:])
    # What the sampler said is random: nothing of it is near the trainer's log-probabilities.
    assert all(0.5 < row["rollout/sampler_corrected_fraction"] < 1 for row in expected[1:])
    files = [p.relative_to(tmp_path / "all") for p in tmp_path.glob("all/checkpoints/*/*/*.distcp")]
    assert len(files) == 2 * 2  # steps 2 and 3, two roles; the first of two replicas writes
    for file in [*files, "hf_export/model.safetensors"]:
        assert (tmp_path / "all" / file).read_bytes() == (tmp_path / "turns" / file).read_bytes()
    peaks = json.loads((tmp_path / "turns/metrics.jsonl").read_text().splitlines()[-1])
    for phase in ("values", "logprobs", "critic_update", "actor_update"):
        # Nothing of this size; pages of a process that has imported torch.
        assert 5e7 < peaks[f"memory/{phase}_peak_bytes"] < peaks["memory/peak_bytes"] < 1e11


def test_the_last_checkpoint_is_waited_for_in_its_phase(monkeypatch):
    """That is, within its limit, and not that of what lies between the phases."""
    phases, seen = [], []

    @contextlib.contextmanager
    def phase(name):
        phases.append(name)
        yield
        phases.pop()

    def noted(name):
        return lambda *_: seen.append((name, *phases))

    writer = SimpleNamespace(save=noted("save"), wait=noted("wait"))
    trainer = SimpleNamespace(
        phase=phase, _models={}, _snapshot=(3, {}), _saved=0, _unevaluated=None,
        output=SimpleNamespace(note=len),
        early_stop=SimpleNamespace(signal_name="SIGTERM", has_time_to_save=bool),
        source=SimpleNamespace(finish_in_flight=lambda *_: True, save_in_flight=len),
    )  # fmt: skip
    trainer._save = lambda writer, **how: VapoTrainer._save(trainer, writer, **how)
    VapoTrainer._stop(trainer, writer)
    assert seen == [("save", "checkpoint"), ("wait", "checkpoint")]
    # The one that is being written is that of the last step.
    VapoTrainer._stop(trainer, writer)
    assert seen[2:] == [("wait", "checkpoint")]
    # At the end of a run of one rank, whose every second step is saved.
    del seen[:]
    monkeypatch.setattr("vapo_megatron.training.loop.any_rank", lambda flag: flag)
    trainer.config = VapoConfig.model_validate({"checkpoint": {"every_steps": 2}})
    trainer.early_stop.is_signalled, trainer._is_finished = bool, lambda done: done == 6
    trainer._write_row, writer.poll, writer.seconds = mock.Mock(), noted("poll"), None
    trainer.train_step = lambda step: setattr(trainer, "_snapshot", (step + 1, {})) or {}
    VapoTrainer._run(trainer, 3, writer)
    save = ("save", "checkpoint")
    assert seen == [save, ("poll",), save, ("wait", "checkpoint")]


def test_the_models_leave_before_vllm_is_closed(monkeypatch):
    """It wakes up for that, and an error may have ended a turn with a model on the device."""
    closed = []
    names = ("device_schedule", "source", "watchdog")
    parts = {n: SimpleNamespace(close=lambda n=n: closed.append(n)) for n in names}
    parts["watchdog"].fail, parts["watchdog"].reporting = closed.append, contextlib.nullcontext
    error = RuntimeError("it ended a turn")
    monkeypatch.setattr(build.groups, "destroy", lambda: None)
    monkeypatch.setattr(build.dist, "destroy_process_group", lambda: closed.append("world"))
    run = SimpleNamespace(**parts, worlds=None)
    build.Built.__exit__(run, RuntimeError, error, None)
    assert closed == [error, "device_schedule", "source", "world", "watchdog"]
