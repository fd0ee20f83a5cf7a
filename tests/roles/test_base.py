"""One frozen base below adapters of actor, critic and reference policy, and what each has besides.

Real gloo processes. Counters: what requires a gradient, what DDP reduces, what the optimizer has,
what moves to the host, what a checkpoint holds. Not exercised: a GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.measure import Layout
from tests.parallel.training import parallel_fields
from tests.weights.tiny_hf import write_tiny_hf

RANK, HIDDEN, FFN, LAYERS = 4, 64, 96, 4
HEADS = dict(hidden=HIDDEN, heads=4, kv_heads=2, ffn=FFN, vocab=61, num_layers=LAYERS)
OF_LAYER = {
    # (in, out) of each matrix, with heads of 16.
    "q": (64, 64), "k": (64, 32), "v": (64, 32), "o": (64, 64), "gate": (64, 96), "up": (64, 96),
    "down": (96, 64),
}  # fmt: skip
ADAPTERS = LAYERS * sum(RANK * (i + o) for i, o in OF_LAYER.values())
"""Elements of a model's, over all ranks."""
LAYOUTS = [
    Layout(),
    Layout(tp=2, sp=True),
    Layout(pp=2, vpp=2),
    pytest.param(Layout(pp=2), marks=pytest.mark.slow),
    pytest.param(Layout(dp=2, distributed=True), marks=pytest.mark.slow),
]


def build(hf_path, layout, **lora):
    """(roles by name, config): as training/build.py joins them, offloaded one after the other."""
    from vapo_megatron.config import VapoConfig
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel import groups
    from vapo_megatron.roles.actor import Actor, Reference
    from vapo_megatron.roles.critic import Critic

    tree = {
        "model": {
            "hf_path": hf_path, "dtype": "float32", "layer_spec": "local",
            "make_vocab_size_divisible_by": 8, "lora": {"rank": RANK, **lora},
        },
        "parallel": parallel_fields(layout),
        "algorithm": {"kl_coef": 0.1},
    }  # fmt: skip
    config = VapoConfig.model_validate(tree)
    ranks = groups.initialize(config.parallel)
    shape = read_model_shape(hf_path)
    actor = Actor(shape, config, ranks, hf_path)
    base = {r: actor.placed.base for r in ("critic", "reference") if config.model.lora.shares(r)}
    actor.placed.offload()
    critic = Critic(shape, config, ranks, hf_path, base.get("critic"))
    critic.placed.offload()
    reference = Reference(shape, config, ranks, base.get("reference"))
    reference.placed.offload()
    return {"actor": actor, "critic": critic, "reference": reference}


def named(role):
    return {
        (i, name): parameter
        for i, chunk in enumerate(role.placed._model)
        for name, parameter in chunk.named_parameters()
    }


def shared(hf_path, layout, lora):
    """What each phase has of each role's frozen weights: bytes of all storages, each once, and how
    many parameters lie where the actor's do; a worker's function."""
    roles = build(hf_path, layout, **lora)
    of_actor = named(roles["actor"])
    found = {}
    for role, other in roles.items():
        with other.placed.held("parameters"):
            frozen = {k: p for k, p in named(other).items() if not p.requires_grad}
            same = [k for k, p in frozen.items() if k in of_actor and lies_with(p, of_actor[k])]
            assert role == "actor" or set(frozen) <= set(of_actor)
            everyone = [p for r in roles.values() for p in named(r).values()]
            found[role] = (len(frozen), len(same), bytes_of(everyone), bytes_of(frozen.values()))
    left = bytes_of([p for r in roles.values() for p in named(r).values()])
    return found, left


def lies_with(one, other):
    return one.untyped_storage().nbytes() > 0 and one.data_ptr() == other.data_ptr()


def bytes_of(parameters):
    storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in parameters}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory):
    return str(write_tiny_hf(tmp_path_factory.mktemp("base") / "hf", **HEADS))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return str(write_tiny_hf(tmp_path_factory.mktemp("tied") / "hf", tied=True, **HEADS))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", ["hf_path", "tied"])
def test_all_roles_compute_with_the_actors_storage(workers, request, layout, model):
    path = request.getfixturevalue(model)
    for found, left in workers.run(layout.world_size, shared, path, layout, {}):
        base = found["actor"][3]
        assert left == 0 < base
        for role, (frozen, same, on_device, _) in found.items():
            assert frozen == same > 8, role
            # One base and no more than the adapters of the role at hand.
            own = 4 * (ADAPTERS + HIDDEN) * (role != "reference")
            assert base <= on_device <= base + own * 1.02


def test_two_bases_where_none_is_shared(workers, hf_path):
    layout = Layout(tp=2, sp=True)
    for found, left in workers.run(2, shared, hf_path, layout, {"share_base": False}):
        assert found["critic"][1] == found["reference"][1] == 0 and left == 0
        assert found["actor"][1] == found["actor"][0]


def test_a_role_without_adapters_shares_nothing(workers, hf_path):
    ((found, _),) = workers.run(1, shared, hf_path, Layout(), {"roles": ["actor"]})
    frozen, same, *_ = found["reference"]
    assert found["critic"][:2] == (0, 0) and frozen == same > 8


def resident(hf_path, share_base):
    """Bytes of this process' memory that a larger model's three roles take; a worker's function."""
    import gc

    import psutil

    before = psutil.Process().memory_info().rss
    roles = build(hf_path, Layout(), share_base=share_base)
    with roles["actor"].placed.held("parameters"), roles["critic"].placed.held("parameters"):
        with roles["reference"].placed.held("parameters"):
            gc.collect()
            return psutil.Process().memory_info().rss - before


@pytest.mark.slow
def test_memory_holds_the_weights_once(workers, tmp_path):
    path = write_tiny_hf(
        tmp_path / "hf", hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=300, num_layers=12
    )
    weights = (path / "model.safetensors").stat().st_size
    assert weights > 150e6
    (once,) = workers.run(1, resident, str(path), True)
    (thrice,) = workers.run(1, resident, str(path), False)
    # On a CPU the host's copy is beside the device's.
    assert 1.7 * weights < once < 2.6 * weights
    assert thrice > once + 3.5 * weights


def counters(hf_path, layout):
    """Elements in all, by role, that are trained, reduced, updated, moved, saved; a worker's
    function. Also how the gradient's norm is counted, and how often the base moved."""

    from vapo_megatron.parallel.gradient_buffers import gradient_buffers
    from vapo_megatron.parallel.offload import Offload
    from vapo_megatron.parallel.optimizer_state import state_tensors
    from vapo_megatron.parallel.sharded_state import take_snapshot

    moved = []
    reload = Offload._reload

    def counted(self, before, after):
        moved.append(self.num_bytes)
        reload(self, before, after)

    Offload._reload = counted
    try:
        roles = build(hf_path, layout)
        found = {}
        for name in ("actor", "critic"):
            placed = roles[name].placed
            moved.clear()
            with placed.held("training"):
                moves = list(moved)
                chunks = placed.chunks
                trained = [p for c in chunks for p in c.parameters() if p.requires_grad]
                reduced = sum(b.numel_unpadded for b in gradient_buffers(chunks))
                state = sum(t.numel() for t in state_tensors(placed.optimizer))
                snapshot = take_snapshot(placed.model, placed.optimizer, copy=True)
            saved = {}
            for index, tensor in snapshot.items:
                kind = "optimizer" if index.fqn.startswith("optimizer.") else "model"
                saved[kind] = saved.get(kind, 0) + tensor.numel()
            keys = {index.fqn for index, _ in snapshot.items}
            found[name] = {
                "trained": sum(p.numel() for p in trained), "reduced": reduced, "state": state,
                "saved": saved, "moves": moves, "base": placed.base and placed._offload.num_bytes,
                "keys": sorted(k for k in keys if not k.startswith("optimizer.")),
            }  # fmt: skip
        return found
    finally:
        Offload._reload = reload


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True)], ids=str)
def test_only_adapters_and_the_head_are_trained_reduced_moved_and_saved(workers, hf_path, layout):
    results = workers.run(layout.world_size, counters, hf_path, layout)
    for role, head in (("actor", 0), ("critic", HIDDEN)):
        for rank in results:
            one = rank[role]
            # Parameter, and two moments; the optimizer of float32 has no other copy.
            assert one["reduced"] == one["trained"] and one["state"] == 3 * one["trained"]
            assert one["base"] == 4 * one["state"], "what moves to the host beside the base"
            assert len(one["moves"]) == 2, "the base, and what is the role's own"
            expected = ("_adapter.", "output_layer.") if head else ("_adapter.",)
            assert one["keys"] and all(any(e in k for e in expected) for k in one["keys"])
        saved = sum(rank[role]["saved"]["model"] for rank in results)
        assert saved == ADAPTERS + head
        assert sum(rank[role]["saved"]["optimizer"] for rank in results) >= 2 * (ADAPTERS + head)
        if layout.tp == 1:
            assert results[0][role]["trained"] == ADAPTERS + head
        else:
            # A of qkv, gate and up, and B of o and down, are on both ranks.
            alike = LAYERS * RANK * (5 * HIDDEN + 2 * HIDDEN)
            whole = sum(rank[role]["trained"] for rank in results)
            assert whole == ADAPTERS + alike + 2 * head


def products(hf_path):
    """How often a layer's product is one for each token, of actor (forward and backward) and
    reference; a worker's function."""
    from torch.profiler import profile

    from tests.models.built import call

    roles, size = build(hf_path, Layout()), 37
    counts = {}
    for name, part in {"actor": "training", "reference": "parameters"}.items():
        with roles[name].placed.held(part), profile(record_shapes=True) as seen:
            found = call(roles[name].placed.model[0], [torch.arange(size)])
            if name == "actor":
                found.square().sum().backward()
        found = [e.input_shapes[0][0] for e in seen.events() if e.name == "aten::bmm"]
        counts[name] = sum(batches == size for batches in found)
    return counts


def test_frozen_layers_multiply_all_tokens_at_once(workers, hf_path):
    (counts,) = workers.run(1, products, hf_path)
    assert counts == {"actor": 0, "reference": 0}
