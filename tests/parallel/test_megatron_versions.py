"""What differs between releases of megatron-core; with 0.16 most of it holds by itself.

Every other test runs with the newest release too: bash tests/run.sh --environment newest. Not
exercised: the releases between, and Transformer Engine.
"""

import copy
import logging
import warnings

import pytest

from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.parallel import megatron_versions

KEYS = ("is_decoupled_lr", "is_expert_parallel", "lr_mult", "wd_mult")
OF_RELEASE = {"0.16": KEYS, "0.19": ("end_wd", "max_lr", "min_lr", "optimizer", "start_wd", *KEYS)}
"""param_group_identifier_keys."""


def group(wd_mult, max_lr, **more):
    keys = {"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": False}
    return {**keys, "is_decoupled_lr": False, "max_lr": max_lr, "min_lr": 0.0, **more}


@pytest.mark.parametrize("release", OF_RELEASE)
def test_saved_groups_get_what_this_run_is_told_apart_by(monkeypatch, release):
    from megatron.core.optimizer import optimizer

    monkeypatch.setattr(optimizer, "param_group_identifier_keys", OF_RELEASE[release])
    groups = [group(0.0, 2e-3, step=0), group(1.0, 3e-3, step=0)]
    state = {0: {"optimizer": {"param_groups": [group(1.0, 1.0, step=7), group(0.0, 1.0, step=7)]}}}
    before = copy.deepcopy(state)
    megatron_versions.adopt_group_settings(state, groups)
    if release == "0.19":
        expected = [group(1.0, 3e-3, step=7), group(0.0, 2e-3, step=7)]
        assert state[0]["optimizer"]["param_groups"] == expected
    else:
        assert state == before


def resumed_at_another_rate(hf, root, distributed):
    """Adam's (first moment, step) of a run that resumes at another rate; what users are told."""
    from vapo_megatron.config import CheckpointConfig, VapoConfig
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.optimizer_state import inner_optimizers, make_optimizer_state
    from vapo_megatron.roles.critic import Critic
    from vapo_megatron.run.checkpoint.files import newest_complete
    from vapo_megatron.run.checkpoint.load import load_run
    from vapo_megatron.run.checkpoint.writer import CheckpointWriter

    def built(rate):
        parallel = {"world_size": 1, "use_distributed_optimizer": distributed}
        config = VapoConfig.model_validate(
            {
                "model": {"hf_path": str(hf)},
                "parallel": parallel,
                "optimizer": {"critic_learning_rate": rate},
            }
        )
        place = groups.current() if groups._current else groups.initialize(config.parallel)
        return Critic(read_model_shape(hf), config, place, str(hf)).trained

    def adam(model):
        make_optimizer_state(model.placed.optimizer)
        return [
            state for o in inner_optimizers(model.placed.optimizer) for state in o.state.values()
        ]

    told = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            first, then = built(1e-3), built(1e-4)
            for state in adam(first):
                state["exp_avg"].fill_(0.5)
                state["step"].fill_(3)
            with CheckpointWriter(root, CheckpointConfig()) as writer:
                writer.save(1, {"critic": first}, {})
            load_run(newest_complete(root), {"critic": then})
    finally:
        logging.getLogger().removeHandler(handler)
    found = {(float(s["exp_avg"].unique()), float(s["step"])) for s in adam(then)}
    return found, told + [str(warning.message) for warning in warned]


@pytest.mark.parametrize("distributed", [False, True])
def test_a_run_resumes_at_another_rate_and_users_are_told_nothing(workers, tmp_path, distributed):
    hf = write_tiny_hf(tmp_path / "hf", num_layers=1, hidden=32, heads=2, kv_heads=2, vocab=60)
    (found,) = workers.run(1, resumed_at_another_rate, hf, tmp_path / "checkpoints", distributed)
    assert found == ({(0.5, 3.0)}, [])
