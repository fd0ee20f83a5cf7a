"""What is written right after an update has the parameters that no rank has fetched yet.

With parallel.overlap_param_gather each of two data-parallel ranks has updated its own half, and the
next forward pass would fetch the other's. Compared with what the same updates give without it, byte
by byte. Weight sync: tests/weights/reshard/test_sync.py; offload: tests/parallel/test_offload.py.
"""

import json

import pytest
import torch

from tests.dumped import MODEL
from tests.parallel.training import Layout, make_config
from tests.run.test_skipped_updates import mini_batch_of
from tests.weights.tiny_hf import write_tiny_hf


def write(hf, role, overlap, root):
    """An update, a checkpoint, an update, an export; what part was late before and after each."""
    from vapo_megatron.config import CheckpointConfig
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel import groups
    from vapo_megatron.roles.actor import Actor
    from vapo_megatron.roles.critic import Critic
    from vapo_megatron.run.checkpoint.writer import CheckpointWriter
    from vapo_megatron.weights.export_hf import export_hf

    rate = {f"{role}_learning_rate": 1e-2, f"{role}_warmup_updates": 0}
    config = make_config(
        Layout(dp=2, distributed=True, overlap=overlap),
        model={"hf_path": hf, "dtype": "bfloat16"},
        optimizer=rate,
    )
    groups.destroy()
    shape, place = read_model_shape(hf), groups.initialize(config.parallel)
    model = (Actor if role == "actor" else Critic)(shape, config, place, hf)
    trained, late = model.trained, []

    def updated():
        logprobs = None
        if role == "actor":
            logprobs, _ = model.compute_logprobs(mini_batch_of(model).microbatches)
        model.update([mini_batch_of(model, logprobs)])
        return [p.detach().clone() for p in trained.placed.model[0].parameters()]

    before = updated()
    with CheckpointWriter(root / "checkpoints", CheckpointConfig()) as writer:
        writer.save(1, {role: trained}, {})
    late.append(not all(map(torch.equal, before, trained.placed.model[0].parameters())))
    before = updated()
    export_hf(trained.placed.chunks, shape, place, root / "hf_export", hf, role=role)
    late.append(not all(map(torch.equal, before, trained.placed.model[0].parameters())))
    return late


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_checkpoint_and_an_export_wait_for_them(workers, tmp_path, role):
    hf = str(write_tiny_hf(tmp_path / "hf", **MODEL))
    written = []
    for overlap in (False, True):
        root = tmp_path / str(overlap)
        late = workers.run(2, write, hf, role, overlap, root)
        directory = root / "checkpoints/step_000001"
        sums = json.loads((directory / "checksums.json").read_text())
        written.append(
            (
                {name: sum for name, sum in sums.items() if name.endswith(".distcp")},
                (root / "hf_export/model.safetensors").read_bytes(),
            )
        )
    (checkpoint, export), (of_overlap, export_of_overlap) = written
    assert checkpoint and of_overlap == checkpoint
    assert export_of_overlap == export
    assert late == [[True, True]] * 2, "there was nothing to wait for"
