"""Bytes and time of a weight sync from Megatron into vLLM: by a plan, and by a full gather.

  vapo benchmark reshard --processes 2 --repeats 5

Real engines and models in 2 and 4 CPU processes. Every element of the model is a distinct number,
so the slices that a rank is missing are counted in the live weights, independently of the plan, and
a misplaced element is found.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import save_file

from vapo_megatron.cli.command import ProgressBar, add_values
from vapo_megatron.config import load_config
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.weights.table import hf_tensors

LAYOUTS = {
    # processes -> (TP and PP of the trainer, the rest is data parallel; TP of vLLM)
    2: [(2, 1, 1), (1, 2, 1), (2, 1, 2), (1, 1, 2), (1, 2, 2)],
    4: [(2, 2, 1), (4, 1, 1), (2, 2, 2), (1, 2, 2), (2, 2, 4)],
}


class Measured(NamedTuple):
    """One rank's part of one layout."""

    received: int
    """Bytes by the plan."""
    missing: int
    """Bytes of its engine shard that are not in its trainer shard."""
    unheld: int
    """Bytes of the whole model that are not in its trainer shard; a full gather brings them."""
    seconds: list[float]
    """Of the plan's executions."""
    gather_seconds: list[float]
    """Of gathering full tensors and calling load_weights."""


def write_numbered_model(directory: Path, hidden: int, layers: int, vocab_size: int) -> int:
    """Write an untied Qwen2 whose weights have the bits 1, 2, 3, ...; return how many."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    heads = hidden // 64
    config = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4), "vocab_size": vocab_size, "hidden_act": "silu",
        "max_position_embeddings": 512, "tie_word_embeddings": False, "eos_token_id": 2,
        "torch_dtype": "float32",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    tensors, count = {}, 0
    for name, size in hf_tensors(read_model_shape(directory), "actor").items():
        number = torch.Size(size).numel()
        bits = torch.arange(count + 1, count + 1 + number, dtype=torch.int32)
        tensors[name] = bits.view(torch.float32).view(size)
        count += number
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return count


def measure(
    directory: Path, count: int, engine: Any, config: Any, layout: tuple[int, int], repeats: int
) -> Measured:
    """Measure one trainer layout (TP, PP) on this rank, both ways in turns. Collective.

    `directory` holds the numbered model of `count` elements; `engine` and `config` are vLLM's.
    """
    from vapo_megatron.models.build import build_model
    from vapo_megatron.parallel import groups
    from vapo_megatron.weights.gather import gather_hf_tensors
    from vapo_megatron.weights.load_hf import load_hf_weights
    from vapo_megatron.weights.reshard.sync import WeightSync

    tp_size, pp_size = layout
    sizes = {"tensor_model_parallel_size": tp_size, "pipeline_model_parallel_size": pp_size}
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=sizes)})
    ranks = groups.initialize(config.parallel)
    shape = read_model_shape(directory)
    chunks = build_model(shape, config.model, config.parallel, ranks, "actor", seed=config.seed)
    load_hf_weights(chunks, shape, directory, ranks, "actor")
    held = _elements([p.data for chunk in chunks for p in chunk.parameters()], count)

    sync = WeightSync(shape, ranks, config.model, config.rollout, engine)
    sync.publish(chunks, 0)
    live = {name: weight.tensor for name, weight in engine.live_weights().items()}
    needed = _elements(list(live.values()), count)
    by_plan = {name: tensor.clone() for name, tensor in live.items()}
    ways: tuple[Callable[[], Any], ...] = (
        lambda: sync.publish(chunks, 0),
        lambda: engine.load_weights(gather_hf_tensors(chunks, shape, ranks), 0),
    )
    seconds = [[_timed(way) for way in ways] for _ in range(repeats)]
    wrong = [n for n, t in live.items() if not torch.equal(_bits(t), _bits(by_plan[n]))]
    assert not wrong, f"the two ways differ in {wrong[:3]}"
    groups.destroy()
    return Measured(
        sync.received_bytes,
        4 * int((needed & ~held).sum()),
        4 * (count - int(held.sum())),
        *([pair[i] for pair in seconds] for i in range(2)),
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.int32)


def _elements(tensors: list[torch.Tensor], count: int) -> torch.Tensor:
    """Return bool [count]: which of the model's elements lie in these; 0 is padding."""
    found = torch.zeros(count + 1, dtype=torch.bool)
    for tensor in tensors:
        found[_bits(tensor).long()] = True
    return found[1:]


def _timed(run: Callable[[], Any]) -> float:
    dist.barrier()
    started = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - started


def _rank(
    rank: int, world_size: int, directory: Path, count: int, layouts: list, repeats: int
) -> None:
    """Run one process; rank 0 prints."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    from vapo_megatron.rollout.vllm.engine import RolloutEngine

    init = f"file://{directory}/init_{world_size}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size)
    done, bar = 0, ProgressBar(f"layouts of {world_size} processes")
    for rollout_tp in sorted({layout[2] for layout in layouts}):
        config = load_config(
            [],
            [
                f"parallel.world_size={world_size}", "model.dtype=float32",
                f"rollout.tensor_model_parallel_size={rollout_tp}",
                "rollout.max_prompt_tokens=64", "rollout.max_response_tokens=64",
            ],
        )  # fmt: skip
        inputs = Inputs(read_model_shape(directory), stop_token_ids=(0,))
        bar.show(done, len(layouts))
        engine = RolloutEngine(
            str(directory), inputs, config.rollout,
            dtype="float32", seed=0, offload=False,
        )  # fmt: skip
        for tp_size, pp_size, wanted in layouts:
            if wanted == rollout_tp:
                mine = measure(directory, count, engine, config, (tp_size, pp_size), repeats)
                ranks: list[Any] = [None] * world_size
                dist.all_gather_object(ranks, mine)
                if rank == 0:
                    _report((tp_size, pp_size, rollout_tp), ranks)
                done += 1
                bar.show(done, len(layouts))
        engine.shutdown()
        dist.barrier()
    dist.destroy_process_group()


def _report(layout: tuple[int, int, int], ranks: list[Measured]) -> None:
    tp_size, pp_size, rollout_tp = layout
    dp_size, replicas = len(ranks) // (tp_size * pp_size), len(ranks) // rollout_tp
    received, missing = sum(r.received for r in ranks), sum(r.missing for r in ranks)
    assert received or not missing, "nothing was received"
    ratio = received / missing if missing else 1.0
    plan = statistics.median(ranks[0].seconds)
    gather = statistics.median(ranks[0].gather_seconds)
    name = f"TP{tp_size} PP{pp_size} DP{dp_size} -> {replicas} x TP{rollout_tp}"
    by_plan = " ".join(f"{r.received / 1e6:.1f}" for r in ranks)
    by_gather = " ".join(f"{r.unheld / 1e6:.1f}" for r in ranks)
    print(
        f"{name:<22}{by_plan:>24} {ratio:7.3f} {plan:9.3f} s"
        f"{by_gather:>24} {gather:9.3f} s {plan / gather:7.2f}",
        flush=True,
    )


def reshard(options: argparse.Namespace) -> None:
    """Print bytes and median seconds of both ways for each layout, and their ratios."""
    if options.hidden % 256:
        raise ConfigError(
            f"--hidden={options.hidden} must be a multiple of 256 (heads of 64, divided by 4); "
            "change it"
        )
    os.environ.update(OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="ERROR")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        size = (options.hidden, options.layers, options.vocab_size)
        count = write_numbered_model(directory, *size)
        print(
            f"{count / 1e6:.1f} million float32 parameters, {count * 4 / 1e6:.0f} MB; "
            f"medians of {options.repeats}; bytes in MB, rank by rank\n"
            f"{'':<22}{'received by the plan':>24} {'/ lack':>7} {'time':>11}"
            f"{'brought by a gather':>24} {'time':>11} {'ratio':>7}",
            flush=True,
        )
        for world_size in [options.processes] if options.processes else sorted(LAYOUTS):
            torch.multiprocessing.spawn(
                _rank,
                (world_size, directory, count, LAYOUTS[world_size], options.repeats),
                nprocs=world_size,
            )


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the subcommand `reshard`."""
    command = commands.add_parser(
        "reshard", help="weight sync into vLLM by a plan against a full gather", description=__doc__
    )
    add_values(
        command, int, "N",
        ("--hidden", 512, "hidden size (default: %(default)s)"),
        ("--layers", 4, "number of layers (default: %(default)s)"),
        ("--vocab-size", 8192, "size of the vocabulary (default: %(default)s)"),
        ("--repeats", 5, "of each way; the medians count (default: %(default)s)"),
    )  # fmt: skip
    command.add_argument("--processes", type=int, choices=sorted(LAYOUTS), help="default: each")
    command.set_defaults(measure=reshard, device="cpu")
