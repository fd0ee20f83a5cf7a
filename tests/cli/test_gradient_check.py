"""Full gradients in any layout, their files and the comparison of two layouts.

Gradients of every layout against one process are tests/distributed's subject. Not exercised: NCCL.
"""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.dumped import MODEL, config, dump
from tests.parallel.training import Layout, Trained, make_config
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.cli.gradients import main

TWO_RANKS = (((0, 1, 2, 3), (5,)), ((6,), (4,)))


def _gradients(hf_path, layout, sections, bucket_bytes):
    """Gradients of the first update, the parameters before and after, and the update's norm."""
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.optimizer import optimizer_step
    from vapo_megatron.weights.gather import full_gradients

    config = make_config(layout, **sections)
    place = groups.initialize(config.parallel)
    trained = Trained(hf_path, layout, "actor", config)
    trained.forward_backward()
    before = [p.detach().clone() for p in trained.model[0].parameters()]
    named = full_gradients(trained.chunks, trained.shape, place, "actor", bucket_bytes=bucket_bytes)
    gradients = {name: g.clone() for name, g in named}
    after = [p.detach().clone() for p in trained.model[0].parameters()]
    assert all(map(torch.equal, before, after)), "gathering must leave the parameters alone"
    assert [p.dtype for p in before] == [p.dtype for p in after]
    return gradients, float(optimizer_step(trained.optimizer)), trained.full_tensors()


@pytest.mark.parametrize(
    "tied,dtype", [pytest.param(True, "float32", marks=pytest.mark.slow), (False, "bfloat16")]
)
def test_the_distributed_optimizer_changes_no_gradient(workers, tmp_path, tied, dtype):
    hf = str(write_tiny_hf(tmp_path, tied=tied, **MODEL))
    sections = {"model": {"dtype": dtype}}
    plain = Layout(dp=2, split=TWO_RANKS)
    expected, norm, weights = workers.run(2, _gradients, hf, plain, sections, 1 << 30)[0]
    assert "lm_head.weight" not in expected or not tied
    total = sum(g.double().square().sum() for g in expected.values()).sqrt()
    assert norm == pytest.approx(float(total), rel=1e-6)
    for overlap in (False, True):
        layout = plain._replace(distributed=True, overlap=overlap)
        for found in workers.run(2, _gradients, hf, layout, sections, 4000):
            gradients, same_norm, same_weights = found
            assert set(gradients) == set(expected)
            for name, gradient in gradients.items():
                assert gradient.dtype == torch.float32
                torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0, msg=name)
            assert same_norm == pytest.approx(norm, rel=1e-6)
            torch.testing.assert_close(same_weights, weights)


def test_gradients_of_shards_and_stages(workers, tmp_path):
    hf = str(write_tiny_hf(tmp_path, tied=True, **MODEL))
    expected, *_ = workers.run(1, _gradients, hf, Layout(), {}, 1 << 30)[0]
    for layout in (Layout(tp=2, sp=True), Layout(pp=2)):
        for gradients, *_ in workers.run(layout.world_size, _gradients, hf, layout, {}, 4000):
            assert set(gradients) == set(expected)
            for name, gradient in gradients.items():
                error = (gradient - expected[name]).norm() / expected[name].norm()
                assert error < 1e-5, f"{layout}: {name} differs by {error:.2e}"


def _collect(*arguments):
    """The command on this rank, as under torchrun."""
    dist.destroy_process_group()
    return main(["collect", *map(str, arguments)])


@pytest.fixture(scope="module")
def collect(workers, tmp_path_factory):
    """collect(number of processes, overrides) -> directory; on one dump, dumped by two ranks."""
    root = tmp_path_factory.mktemp("gradients")
    workers.run(2, dump, root / "run/replay", [1], 2)
    file, count = root / "config.yaml", iter(range(99))
    file.write_text(config(write_tiny_hf(root / "hf", **MODEL)).to_yaml())

    def run(world_size, *overrides):
        out = root / f"out_{next(count)}"
        paths = ("--config", file, "--replay", root / "run", "--out", out)
        world = f"parallel.world_size={world_size}"
        arguments = (*paths, *overrides, world)
        assert workers.run(world_size, _collect, *arguments) == [0] * world_size
        return out

    return run


@pytest.fixture(scope="module")
def one(collect):
    return collect(1)


def test_two_layouts_have_the_same_gradients(collect, one, capsys):
    # Options may stand between the fields.
    tp, sp = "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"
    two = collect(2, tp, "--step", 1, sp)
    assert set(load_file(two / "actor.safetensors")) == set(load_file(one / "actor.safetensors"))
    assert main(["compare", str(one), str(two)]) == 0
    text = capsys.readouterr().out
    assert "TP1 PP1 VPP1 DP1" in text and "TP2 PP1 VPP1 DP1" in text
    for name in ("critic score.weight", "actor model.layers.1.self_attn.k_proj.bias"):
        assert name in text
    # Embedding, final norm, 12 tensors in each of 2 layers, and one head a role.
    assert "54 parameters: none exceeds the tolerance 1e-05" in text
    assert "no gradient" not in text
    # 1e-9 is less than rounding: what compares is not two copies of one file.
    assert main(["compare", str(one), str(two), "--tolerance", "1e-9"]) == 1


def test_data_parallel_ranks_with_their_own_microbatches(collect, one):
    two = collect(2, "parallel.max_tokens_per_microbatch=20")
    assert main(["compare", str(one), str(two)]) == 0


@pytest.mark.parametrize("method", ["dion", "muon"])
def test_updates_of_matrices_are_alike_in_layouts(collect, capsys, method):
    """And with other optimizers they are not."""
    methods = [f"optimizer.{role}_method={method}" for role in ("actor", "critic")]
    given = ("--update", *methods, "optimizer.adam_eps=1e-3")
    one, two = collect(1, *given), collect(2, *given, "parallel.tensor_model_parallel_size=2")
    # What is orthonormal has rounding in weak directions, too.
    tolerance = ("--tolerance", "3e-5")
    assert main(["compare", str(one), str(two), *tolerance]) == 0
    text = capsys.readouterr().out
    assert "actor_update model.layers.1.self_attn.q_proj.weight" in text
    assert "108 parameters: none exceeds" in text
    adamw = collect(1, "--update", "optimizer.adam_eps=1e-3")
    assert main(["compare", str(one), str(adamw), *tolerance]) == 1
    lines = capsys.readouterr().out.splitlines()
    # Seven matrices in each of two layers of two models.
    assert lines[-1] == "108 parameters: 28 exceed the tolerance 3e-05"


def test_the_gradients_of_another_loss_differ(collect, one, capsys):
    other = collect(1, "algorithm.positive_lm_coef=0")
    assert main(["compare", str(one), str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if "parameter" in line)
    roles = [line.split()[2] for line in lines[first + 1 :][:54]]
    assert roles == ["actor"] * 27 + ["critic"] * 27, "the largest first"
    assert lines[-1] == "54 parameters: 27 exceed the tolerance 1e-05"


def test_tensors_are_written_in_any_order(tmp_path):
    from vapo_megatron.cli.gradient_check import _write_streamed

    tensors = {name: torch.randn(3, size) for name, size in (("a", 2), ("b", 5), ("c", 1))}
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    transposed = tensors["b"].t().contiguous().t()  # not contiguous
    order = [("c", tensors["c"]), ("b", transposed), ("a", tensors["a"])]
    _write_streamed(tmp_path / "some.safetensors", shapes, order, {})
    found = load_file(tmp_path / "some.safetensors")
    torch.testing.assert_close(found, tensors, rtol=0, atol=0)


@pytest.mark.parametrize("edit", ["scaled", "nan", "one element"])
def test_an_edited_gradient_is_found(one, tmp_path, capsys, edit):
    name = "model.layers.0.mlp.up_proj.weight"
    for role in ("actor", "critic"):
        tensors = load_file(one / f"{role}.safetensors")
        if role == "critic" and edit == "scaled":
            tensors[name] *= 1 + 1e-4
        elif role == "critic":
            tensors[name][3, 5] = float("nan") if edit == "nan" else 1.0
        save_file(tensors, tmp_path / f"{role}.safetensors")
    assert main(["compare", str(one), str(tmp_path)]) == 1
    out = capsys.readouterr().out
    table = out.split("parameter\n")[1].splitlines()
    assert table[0].endswith(f"critic {name}")
    assert out.splitlines()[-1] == "54 parameters: 1 exceed the tolerance 1e-05"


@pytest.mark.parametrize("argv", [["compare", "a", "b", "c=1"], ["collect", "--no-such", "a=1"]])
def test_what_it_does_not_know_is_named(argv, capsys):
    required = ["--config", "x", "--replay", "x", "--out", "x"] * (argv[0] == "collect")
    assert main([*argv, *required]) == 2
    assert argv[-1 if argv[0] == "compare" else 1] in capsys.readouterr().err


def test_a_missing_file_is_one_line(one, tmp_path, capsys):
    assert main(["compare", str(one), str(tmp_path)]) == 2
    assert "critic.safetensors" in capsys.readouterr().err
