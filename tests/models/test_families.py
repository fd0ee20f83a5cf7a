"""Every family, tied and untied, in tensor-parallel and pipeline layouts, against transformers.

Logits are compared with transformers' in float32, the gradient of every parameter with its model in
float64. The gradients of the query's and the key's norm are the delicate ones: the weights are
replicated, but each tensor-parallel rank sees its own query heads, and a key head that it may
share.

Does not exercise virtual stages: tests/distributed does, with Qwen2.
"""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.cut import batch_of, select
from tests.models.built import Layout, build, write_hf
from tests.models.float64 import load_float64
from tests.parallel import training

VOCAB = 300
LENGTHS = (5, 40, 2, 9, 70)
MODELS = {
    "qwen2": {},
    "qwen2 tied": {"tied": True},
    # Query and output projections of 4 * 32 rows, twice the hidden size.
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "qwen3 tied": {"family": "qwen3", "head_dim": 32, "tied": True, "kv_heads": 4},
    "qwen3, one key-value head": {"family": "qwen3", "head_dim": 32, "kv_heads": 1},
    "llama": {"family": "llama"},
    "llama tied": {"family": "llama", "tied": True},
}
# With 2 key-value heads, ranks of TP 4 share them in pairs.
LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(pp=2),
    pytest.param(Layout(tp=4), marks=pytest.mark.slow),
    pytest.param(Layout(tp=4, sp=True), marks=pytest.mark.slow),
    Layout(tp=2, pp=2),
    Layout(tp=2, pp=2, sp=True),
    pytest.param(Layout(tp=4, pp=2), marks=pytest.mark.slow),
]
# Of the largest logit: see test_parity.py.
LOGITS = 2e-6
# Of the gradient's norm.
GRADIENTS = 5e-6


def batch():
    """Sequences whose first token is the prompt."""
    tokens = torch.randint(VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor(LENGTHS)
    # The loss is sum(weights * logits); each token carries the seed of its weights.
    seeds = torch.arange(int((lengths - 1).sum())).float()
    return batch_of(tokens, lengths, lengths - 1, advantages=seeds)


def weights_of(advantages):
    """[T, V]"""
    rows = torch.randn(
        sum(LENGTHS) - len(LENGTHS), VOCAB, generator=torch.Generator().manual_seed(4)
    )
    return rows[advantages.long()]


def measure(hf_paths, layout):
    """Return for each model its logits before every response token [T, V], and its gradients."""
    from vapo_megatron.data.microbatch import make_microbatch
    from vapo_megatron.models.build import gather_hidden, output_weight
    from vapo_megatron.parallel.optimizer import build_ddp
    from vapo_megatron.parallel.schedule import forward_backward, forward_only
    from vapo_megatron.weights.gather import full_gradients
    from vapo_megatron.weights.load_hf import load_hf_weights

    # A tied model's copy of the embedding and every other parameter must come from the file.
    torch.manual_seed(dist.get_rank())
    multiple = layout.tp if layout.sp else 1
    microbatches = [
        make_microbatch(select(batch(), part), multiple_of=multiple) for part in ([0, 4, 2], [3, 1])
    ]
    found = {}
    for name, hf_path in hf_paths.items():
        model = build(hf_path, layout)
        load_hf_weights(model.chunks, model.shape, hf_path, model.ranks, "actor")
        chunks = build_ddp(model.chunks, model.config.parallel, model.chunks[0].config)

        def local_logits(output, microbatch, model=model):
            hidden = gather_hidden(output, sequence_parallel=layout.sp)
            return hidden[microbatch.predicting] @ output_weight(model.chunks[-1]).t()

        def logits(output, microbatch, model=model, local_logits=local_logits):
            local = local_logits(output, microbatch).contiguous()
            parts = [torch.empty_like(local) for _ in range(layout.tp)]
            dist.all_gather(parts, local, group=model.ranks.tp_group)
            return torch.cat(parts, -1)[:, :VOCAB].contiguous()

        def loss(output, microbatch, model=model, local_logits=local_logits):
            local = local_logits(output, microbatch)
            first = model.ranks.tp_rank * local.size(1)
            mine = weights_of(microbatch.batch.advantages)[:, first : first + local.size(1)]
            return (local[:, : mine.size(1)] * mine).sum(), {}

        outputs = torch.cat(forward_only(chunks, microbatches, logits))
        forward_backward(chunks, microbatches, loss)
        named = full_gradients(chunks, model.shape, model.ranks, "actor")
        gradients = {name: gradient.clone() for name, gradient in named}
        assert_same_on_all_ranks(model, gradients)
        found[name] = (outputs, gradients)
    return found


def assert_same_on_all_ranks(model, gradients):
    """Compare this rank's gradient of a replicated weight; only the first rank's is gathered."""
    from vapo_megatron.weights.parameters import local_parameters

    parameters = [p for chunk in model.chunks for p in chunk.parameters()]
    places = local_parameters(model.chunks, model.shape, "actor")
    for parameter, place in zip(parameters, places, strict=True):
        if place.row.kind == "replicated":
            (name,) = place.hf_names
            assert torch.equal(parameter.main_grad, gradients[name]), name


@pytest.fixture(scope="module")
def hf_paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {
        name: write_hf(root / name, vocab=VOCAB, num_layers=2, **settings)
        for name, settings in MODELS.items()
    }


@pytest.fixture(scope="module")
def expected(hf_paths):
    """transformers' float32 logits, and its float64 gradients, in the order of `measure`."""
    from transformers import AutoModelForCausalLM

    whole = batch()
    sequences = whole.tokens.split(LENGTHS)
    order = [0, 4, 2, 3, 1]
    advantages = torch.cat([whole.advantages.split([n - 1 for n in LENGTHS])[i] for i in order])
    found = {}
    for name, hf_path in hf_paths.items():
        model = AutoModelForCausalLM.from_pretrained(hf_path, dtype=torch.float32)
        with torch.no_grad():
            logits = torch.cat([model(sequences[i][None]).logits[0, :-1] for i in order])
        model = load_float64(hf_path)
        wide = torch.cat([model(sequences[i][None]).logits[0, :-1] for i in order])
        (wide * weights_of(advantages)).sum().backward()
        # A tied model's output projection is the embedding: named once.
        found[name] = (logits, {n: p.grad for n, p in model.named_parameters()})
    return found


@pytest.fixture(scope="module")
def one(workers, hf_paths):
    (found,) = workers.run(1, measure, hf_paths, Layout())
    return found


def assert_gradients_close(ours, theirs):
    assert set(ours) == set(theirs)
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm() / gradient.norm()
        assert error < GRADIENTS, f"{name}: {error:.1e}"


@pytest.mark.parametrize("name", MODELS)
def test_one_process(name, one, expected):
    logits, gradients = expected[name]
    assert (one[name][0] - logits).abs().max() <= LOGITS * logits.abs().max()
    assert_gradients_close(one[name][1], gradients)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(layout, workers, hf_paths, one, expected):
    for rank in workers.run(layout.world_size, measure, hf_paths, layout):
        for name, (logits, gradients) in rank.items():
            theirs = expected[name][0]
            assert (logits - theirs).abs().max() <= LOGITS * theirs.abs().max(), name
            assert_gradients_close(gradients, expected[name][1])
            assert_gradients_close(gradients, one[name][1])


def test_an_update_of_qwen3_over_data_parallel_ranks(workers, hf_paths):
    """The distributed optimizer: each data-parallel rank finishes and updates its shard."""
    paths = {"actor": hf_paths["qwen3"]}
    (alone,) = workers.run(1, training.run_layout, paths, training.Layout(), 1)
    layout = training.Layout(
        tp=2, dp=2, distributed=True, overlap=True, split=(((0, 1, 2, 3), (5,)), ((6,), (4,)))
    )
    expected = alone["actor"]
    before = load_file(hf_paths["qwen3"] + "/model.safetensors")
    for rank in workers.run(4, training.run_layout, paths, layout, 1):
        found = rank["actor"]
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
        for name, weight in expected.weights.items():
            # Weights of about 1 have steps of 6e-8; an update moves them by up to 3e-3.
            assert (found.weights[name] - weight).abs().max() < 1e-6, name
            if "_norm" in name:
                assert (weight - before[name]).abs().max() > 1e-5
