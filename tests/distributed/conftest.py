"""The references of the matrix, made once, and the line that says how exact it was."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import SUMMARY
from tests.distributed import float64, problem
from tests.distributed.record import Record
from tests.weights.peft_directory import ALL, write_adapters
from tests.weights.tiny_hf import write_tiny_hf


@pytest.fixture(scope="session")
def record(pytestconfig) -> Record:
    """What has been compared so far."""
    record = Record()
    pytestconfig.stash[SUMMARY].append(record.lines)
    return record


class References:
    """HF directories and the float64 gradients of every loss on them, made when first asked for."""

    def __init__(self, root) -> None:
        self._root = root
        self._made: dict[str, tuple] = {}

    def get(self, role: str, variant: str = "") -> tuple[str, str, problem.Problem]:
        """(HF directory, file of the expected gradients, problem) of a model.

        Two layers. Variants: "tied" embeddings; "mha", as many key-value heads as heads; "other
        observations". Four layers: "deep"; "bfloat16" weights; "experts", "some experts", in whose
        second layer there are none and whose chosen weights do not add up to 1; "adapters" on all
        matrices, "some adapters" on the queries, values and ups, "attention's adapters" in a
        mixture of experts.
        """
        key = f"{role}-{variant}"
        if key not in self._made:
            self._made[key] = self._make(role, variant, self._root / key)
        return self._made[key]

    def _make(self, role, variant, directory):
        sizes = dict(hidden=64, heads=4, kv_heads=2, ffn=96, vocab=problem.VOCAB)
        sizes["num_layers"] = 2 if variant in ("", "tied", "mha", "other observations") else 4
        if variant == "mha":
            sizes["kv_heads"] = 4
        if variant.endswith("experts") or variant == "attention's adapters":
            sizes |= {"family": "qwen3_moe", "seed": 1}
        if variant == "some experts":
            sizes["config"] = {"mlp_only_layers": [1], "norm_topk_prob": False}
        dtype = torch.bfloat16 if variant == "bfloat16" else torch.float32
        path = str(write_tiny_hf(directory, tied=variant == "tied", dtype=dtype, **sizes))
        _turn_faster(path)
        if variant == "tied":
            _change(path, lambda t: t["model.embed_tokens.weight"].mul_(0.5))
        given = problem.make_problem()
        if variant == "other observations":
            given = problem.with_other_observations(given)
        if variant.endswith("experts"):
            # A tie would be decided by rounding: the reference has none, so routes must be equal.
            assert float64.routing_margin(path, given) > 2e-5
        if variant.endswith("adapters"):
            write_adapters(path, path + "/adapter", _TARGETS[variant])
        margin = 0.1 if variant == "bfloat16" else 1e-3
        if role == "actor":
            with torch.no_grad():
                logprobs, _ = float64.actor_outputs(float64.load_policy(path), given)
            edges = (math.log(0.8), math.log(1.28))
            given = given._replace(old_logprobs=problem.near(logprobs, 0.25, edges, margin))
            given = given._replace(rollout_logprobs=problem.sampled(logprobs, given.old_logprobs))
            expected = float64.actor_reference(path, given)
        else:
            _change(path, _give_score_head)
            with torch.no_grad():
                values = float64.critic_values(float64.load_critic(path), given)
            edges = (problem.VALUE_CLIP, -problem.VALUE_CLIP)
            given = given._replace(old_values=problem.near(values, 0.4, edges, margin))
            expected = float64.critic_reference(path, given)
        file = directory / "expected.pt"
        torch.save(expected, file)
        return path, str(file), given


_TARGETS = {
    "adapters": ALL,
    "some adapters": ("q_proj", "v_proj", "up_proj"),
    "attention's adapters": ALL[:4],
}


def _turn_faster(path: str) -> None:
    """Lower the rotary base: without rotation the key bias has no gradient but rounding's."""
    file = Path(path, "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_theta": 100.0}))


def _change(path: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path + "/model.safetensors")
    change(tensors)
    save_file(tensors, path + "/model.safetensors")


def _give_score_head(tensors: dict[str, torch.Tensor]) -> None:
    """In the output projection's place."""
    output = tensors.pop("lm_head.weight")
    generator = torch.Generator().manual_seed(5)
    score = torch.randn(1, output.shape[1], generator=generator) * 0.3
    tensors["score.weight"] = score.to(output.dtype)


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> References:
    """references.get(role, variant) -> (HF directory, expected gradients, problem)."""
    return References(tmp_path_factory.mktemp("references"))
