"""A run of TP2 goes on under other layouts and numbers of processes as under its own, and a run of
each layout, restarted under the same one, bit by bit.

Whole trainers in real gloo processes, with both roles, both optimizers, warm-ups and a data set;
only what samples is replaced, by responses that depend on the prompt alone. Compared are the rows
of the step that sees the loaded parameters and of the step that sees one further update of them,
and after it every parameter and the optimizer's state, read by torch itself from what each layout
saves. Not exercised: bfloat16 (tests/run/checkpoint/test_load.py), vLLM and a GPU.
"""

import random
import shutil
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import jsonl
from tests.dumped import GROUP_SIZE, MODEL, NUM_RESPONSES
from tests.weights.tiny_hf import write_tiny_hf
from tests.whole_run import Given, saved, settings, trainer
from vapo_megatron.algorithm.group_sampling import repeat_for_group
from vapo_megatron.data.prompts import Problem, PromptDataset
from vapo_megatron.data.rollout import Rollout, ScoredRollout
from vapo_megatron.rollout.requests import assign

SAVED_AT, STEPS = 3, 5
TOLERANCE = 1e-6
LAYOUTS = {
    "TP1": (1, 1, 1), "PP2": (2, 1, 2), "DP2": (2, 1, 1),
    "TP2 DP2": (4, 2, 1), "TP2 PP2": (4, 2, 2), "PP2 DP2": (4, 1, 2),
}  # fmt: skip
"""Name: (processes, TP, PP). TP1 in one process is TP1 x DP1, and in two processes DP2."""
OF_EXPERTS = {
    "TP2 EP2": (2, 2, 1, 2), "EP2": (2, 1, 1, 2), "TP2": (2, 2, 1, 1), "TP1": (1, 1, 1, 1),
    "TP2 DP2 EP4": (4, 2, 1, 4), "PP2 EP2": (4, 1, 2, 2),
}  # fmt: skip
"""Name: the same with EP, of a mixture of experts."""
VOCABULARIES = ("embedding", "output_layer", "embed_tokens", "lm_head")
FEW = ("TP1", "DP2")
OPTIMIZERS = {
    "distributed": (True, "adamw"), "whole": (False, "adamw"), "dion": (True, "dion"),
    "muon": (True, "muon"), "adapters": (True, "adamw"), "adapters, whole": (False, "adamw"),
}  # fmt: skip
"""Name: is it megatron-core's distributed optimizer, and what updates matrices?"""


class Drawn(Given):
    """Responses to a data set's next prompts, drawn by prompt and sample alone, of a trainer."""

    def __init__(self, trainer):
        super().__init__(self.draw)
        self.ranks, problems = trainer.ranks, [Problem(str(i), str(i)) for i in range(7)]
        self.data = PromptDataset(
            problems, lambda text: [int(text), 5] if text else [],
            path="", seed=trainer.config.seed, shuffle=True, max_prompt_tokens=2,
        )  # fmt: skip
        self.state_dict, self.load_state_dict = self.data.state_dict, self.data.load_state_dict

    def draw(self, asked):
        prompts = repeat_for_group(self.data.next(NUM_RESPONSES // GROUP_SIZE), GROUP_SIZE)
        mine = assign(len(prompts), self.ranks.world_size)[self.ranks.rank]
        return [self.response(prompts[p], p, asked.policy_version) for p in mine]

    def response(self, prompt, position, version):
        draw = random.Random(prompt.index * GROUP_SIZE + position % GROUP_SIZE)
        tokens = tuple(draw.randrange(60) for _ in range(draw.randint(1, 12)))
        logprobs = tuple(-draw.randint(2000, 9000) / 1024 for _ in tokens)
        sample = position % GROUP_SIZE
        rollout = Rollout(prompt, sample, position, tokens, logprobs, False, version)
        status = draw.choice(["correct", "wrong"])
        return ScoredRollout(rollout, "", status, 1.0 if status == "correct" else -1.0)


def reward_model(hf, directory):
    """Make one of a model: as a critic it has a head, and a bias that no layout may lose."""
    shutil.copytree(hf, directory)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    tensors["score.weight"] = torch.randn(1, MODEL["hidden"], generator=generator) * 0.2
    tensors["score.bias"] = torch.tensor([0.5])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def make_run(workers, root, layout, optimizer, family="qwen2"):
    """(model, run directory without a stop, its optimizer)."""
    hf = write_tiny_hf(root / "hf", **MODEL, family=family)
    reward_model(hf, root / "reward_model")
    workers.run(layout[0], fit, hf, root / "run", layout, optimizer)
    return hf, root / "run", optimizer


def fit(hf, run_dir, layout, optimizer, resumes=False):
    """Make the run's steps that are missing; a worker's function. optimizer: of OPTIMIZERS."""
    from vapo_megatron.roles import placed as trained_model

    world_size, tp_size, pp_size, *ep_size = layout
    distributed, method = OPTIMIZERS[optimizer]
    has_adapters = optimizer.startswith("adapters")
    start = {"critic_hf_path": str(hf.parent / "reward_model")}
    if has_adapters:
        # The critic shares the actor's weights; B is 0 at first, and A learns after it.
        start = {"lora": {"rank": 4, "alpha": 16}}
    tree = {
        "model": {"make_vocab_size_divisible_by": 64, **start},
        # One update of each role a step: its row has the loss before that update.
        "algorithm": {
            "mini_batch_size": NUM_RESPONSES, "value_pretraining_steps": 1,
            "policy_steps": STEPS - 1,
        },
        "checkpoint": {"every_steps": SAVED_AT, "hf_export": False},
        "optimizer": {
            "actor_learning_rate": 1e-2, "actor_warmup_updates": 20,
            "critic_learning_rate": 1e-2, "critic_warmup_updates": 20,
            # With less, an entry whose gradient is rounding alone (a key's bias) moves like others.
            "adam_eps": 1e-4, "actor_method": method, "critic_method": method,
        },
        "parallel": {
            "world_size": world_size, "tensor_model_parallel_size": tp_size,
            "pipeline_model_parallel_size": pp_size, "use_distributed_optimizer": distributed,
            "expert_model_parallel_size": sum(ep_size) or 1,
            "sequence_parallel": bool(ep_size) and tp_size > 1,
        },
    }  # fmt: skip
    read = trained_model.load_hf_weights
    with (
        mock.patch.object(trained_model, "load_hf_weights", side_effect=read) as reading,
        trainer(settings(hf, run_dir, **tree), source=Drawn) as made,
    ):
        made.fit()
    expected = 1 if has_adapters else 0 if resumes else 2
    assert reading.call_count == expected, "a checkpoint has all weights, but for a frozen base"


def rows(run_dir):
    """The metrics of each step that do not depend on the machine."""
    rooms = ("actor/", "critic/", "algorithm/", "reward/", "rollout/")
    found = jsonl.read(run_dir / "metrics.jsonl")
    return [{n: v for n, v in row.items() if n.startswith(rooms)} for row in found]


def of_both(run_dir, step):
    """Every tensor of a step's checkpoint in full; vocabularies unpadded."""
    tensors = {}
    for role in ("actor", "critic"):
        for name, value in saved(run_dir, step, role).items():
            is_vocabulary = any(part in name for part in VOCABULARIES)
            tensors[f"{role} {name}"] = value[: MODEL["vocab"] if is_vocabulary else None]
    return tensors


@pytest.fixture(
    scope="module",
    params=[
        "distributed", "dion",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("whole", "muon")),
    ],
)  # fmt: skip
def straight(request, workers, tmp_path_factory):
    """A run of TP2."""
    return make_run(workers, tmp_path_factory.mktemp("layouts"), (2, 2, 1), request.param)


@pytest.fixture(
    scope="module", params=["distributed", pytest.param("whole", marks=pytest.mark.slow)]
)
def straight_experts(request, workers, tmp_path_factory):
    """A run of a mixture of experts, of TP2 EP2."""
    given = tmp_path_factory.mktemp("experts"), OF_EXPERTS["TP2 EP2"], request.param
    return make_run(workers, *given, family="qwen3_moe")


@pytest.fixture(
    scope="module", params=["adapters", pytest.param("adapters, whole", marks=pytest.mark.slow)]
)
def straight_adapters(request, workers, tmp_path_factory):
    """A run with adapters, of TP2."""
    return make_run(workers, tmp_path_factory.mktemp("adapters"), (2, 2, 1), request.param)


def gone_on(workers, hf, run_dir, other, layout, optimizer):
    """Copy a run, and make the steps after the checkpoint once more."""
    shutil.copytree(run_dir, other)
    (other / "checkpoints/latest").write_text(f"step_{SAVED_AT:06d}")
    workers.run(layout[0], fit, hf, other, layout, optimizer, True)
    return other


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[] if n in FEW else pytest.mark.slow) for n in LAYOUTS]
)
def test_another_layout_goes_on_alike(layout, straight, workers, tmp_path):
    goes_on_alike(workers, *straight, tmp_path / "run", LAYOUTS[layout])


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=[] if n == "EP2" else pytest.mark.slow) for n in OF_EXPERTS],
)
def test_experts_go_on_alike_on_other_ranks(layout, straight_experts, workers, tmp_path):
    goes_on_alike(workers, *straight_experts, tmp_path / "run", OF_EXPERTS[layout])


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[] if n == "TP1" else pytest.mark.slow) for n in LAYOUTS]
)
def test_adapters_go_on_alike_on_other_ranks(layout, straight_adapters, workers, tmp_path):
    goes_on_alike(workers, *straight_adapters, tmp_path / "run", LAYOUTS[layout])


def goes_on_alike(workers, hf, run_dir, optimizer, place, layout):
    other = gone_on(workers, hf, run_dir, place, layout, optimizer)
    expected, found = rows(run_dir), rows(other)
    assert len(found) == STEPS + 1
    for step in (SAVED_AT + 1, SAVED_AT + 2):
        assert found[step] == pytest.approx(expected[step], rel=TOLERANCE, abs=TOLERANCE), step
    for role in ("actor", "critic"):
        first, second = (expected[SAVED_AT + i][f"{role}/loss"] for i in (1, 2))
        assert abs(first - second) > 1e3 * TOLERANCE, "an update shows in the loss"
    before, after = of_both(run_dir, SAVED_AT), of_both(run_dir, STEPS)
    again = of_both(other, STEPS)
    assert before.keys() == after.keys() == again.keys()
    for name, tensor in after.items():
        if not tensor.any():  # Moments of an expert that no token chose.
            assert not again[name].any(), name
            continue
        distance, moved = (
            float((tensor - t[name]).norm() / tensor.norm()) for t in (again, before)
        )
        # Weak columns of a basis are brought to the norm of the others, and their rounding too.
        # What reaches an A through the few columns of B is a small sum of large terms.
        allowed = 10 if ".basis." in name else 2 if "_adapter.A." in name else 1
        assert distance < TOLERANCE * allowed, (name, distance)
        assert moved > 100 * TOLERANCE or name == "critic output_layer.bias", (name, moved)


SAME = [(layout, optimizer, "qwen2") for layout in LAYOUTS.values() for optimizer in OPTIMIZERS] + [
    (layout, optimizer, "qwen3_moe")
    for layout in OF_EXPERTS.values()
    for optimizer in ("distributed", "whole")
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "optimizer", "family"), SAME)
def test_the_same_layout_goes_on_bit_by_bit(layout, optimizer, family, workers, tmp_path):
    hf, run_dir, _ = make_run(workers, tmp_path, layout, optimizer, family)
    other = gone_on(workers, hf, run_dir, tmp_path / "other", layout, optimizer)
    assert rows(other) == rows(run_dir)
    after, again = of_both(run_dir, STEPS), of_both(other, STEPS)
    assert after.keys() == again.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, again[name]), name
