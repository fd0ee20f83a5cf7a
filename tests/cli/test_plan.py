"""`vapo plan`: what it prints, and what it refuses. The figures' own tests are in weights/ and
planning/."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import re
import shlex
import time

import pytest

from tests.models.qwen25 import config_json
from vapo_megatron.cli import plan, plan_options
from vapo_megatron.config import load_config

LAYOUT = ["--tp", "8", "--pp", "4", "--vllm-tp", "8"]


def test_reshard_prints_bytes_and_seconds(capsys):
    assert plan.main(["reshard", "--model", "Qwen2.5-32B", *LAYOUT]) == 0
    head, layout, _, columns, *lines = capsys.readouterr().out.splitlines()
    assert head == "Qwen2.5-32B: 32.76e9 parameters in bfloat16, 16 nodes x 8 GPUs"
    assert layout.startswith(
        "trainer TP 8 x PP 4 (VPP 1) x DP 4 -> 16 vLLM replicas of TP 8; planned in "
    )
    assert columns.split()[-6:] == ["GPU", "same", "node", "across", "nodes", "seconds"]
    means = {line[:16].strip(): line[36:].split() for line in lines if "received, mean" in line}
    # A rank lacks three quarters of its eighth of 65.5 GB; gathering, every other rank's shard too.
    assert means["plan"][2] == "6.143" and means["full gather"][1:3] == ["57.354", "6.145"]
    assert float(means["plan"][3]) < 0.5 * float(means["full gather"][3])
    assert sync_seconds(capsys) == float(means["plan"][3])


def sync_seconds(capsys, *options):
    assert plan.main(["reshard", "--model", "Qwen2.5-32B", *LAYOUT, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("plan") and "received, mean" in line)
    return float(row.split()[-1])


def test_a_plan_of_fine_tuning_on_given_responses(capsys):
    options = ["--gpus", "8", "--config", "sft", "--responses", "256", "--mini-batch", "64"]
    assert plan.main(["--model", "Qwen2.5-7B", *options, "--response", "1024"]) == 0
    told = capsys.readouterr().out
    assert "step: 256 responses in groups of 1, mean 1024 tokens" in told
    assert "vLLM: KV cache" not in told and "gpu_memory_utilization: " not in told


@pytest.mark.parametrize(
    ("option", "layout"),
    [("--network", []), ("--nvlink", ["--pp", "1", "--vllm-tp", "4", "--nodes", "1"])],
)
def test_slower_wires_make_a_slower_sync(capsys, option, layout):
    fast, slow = (sync_seconds(capsys, *layout, option, each) for each in ("50", "5"))
    assert slow > 2 * fast


def test_each_rank_and_a_directory(capsys, tmp_path):
    config = {"model_type": "qwen2", **config_json("0.5B")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--tp", "2", "--pp", "2", "--vllm-tp", "1", "--nodes", "1", "--gpus-per-node", "4"]
    assert plan.main(["reshard", "--model", str(tmp_path), *options, "--per-rank"]) == 0
    out = capsys.readouterr().out
    assert "0.49e9 parameters" in out and out.count("rank 3: sent") == 3


HEAD = ["--model", "Qwen2.5-32B", "--gpus", "128", "--gpu-memory", "80GB"]


@pytest.fixture(scope="module")
def printed():
    """What the tool prints, and its CPU seconds; each command is run once."""

    @functools.cache
    def run(*options):
        started, out = time.process_time(), io.StringIO()
        with contextlib.redirect_stdout(out):
            assert plan.main(list(options)) == 0
        return out.getvalue(), time.process_time() - started

    return run


def test_a_plan(printed, tmp_path):
    """Ranked, with one layout in detail and YAML that a run would take; in seconds."""
    out, seconds = printed(*HEAD)
    assert seconds < 10
    job, table, legend, rejected, head, memory, times, rest, pasted, notes = out.split("\n\n")
    assert job.splitlines()[0] == (
        "Qwen2.5-32B: 32.76e9 parameters, actor and critic, on 128 GPUs in 16 nodes"
    )
    columns, *rows = table.splitlines()
    assert columns.split()[:5] == ["TP", "PP", "VPP", "DP", "vLLM"] and len(rows) == 13
    seconds = [int(row.split()[9]) for row in rows[:12]]
    assert seconds == sorted(seconds)
    for name in ("range", "vLLM", "share", "budget", "copies", "bubble", "uneven", "tok/s/GPU"):
        assert name in columns and f"{name}:" in legend
    assert (
        "TP 1 x PP 1: actor_update needs 2" in rejected and "GB of 80.0 (gradients 131" in rejected
    )
    sizes = rows[0].split()
    assert head.startswith(f"TP {sizes[0]} x PP {sizes[1]} x DP {sizes[3]} (VPP {sizes[2]})")
    totals = {line.split()[0]: float(line.split()[-1]) for line in memory.splitlines()[1:]}
    assert max(totals.values()) == float(sizes[-2]) <= 80 and len(totals) == 6
    # Bubble and imbalance of the row are between those of its phases.
    for column, pattern in ((18, r"bubble ([\d.]+)%"), (19, r"slowest rank \+([\d.]+)%")):
        shares = [float(share) for share in re.findall(pattern, times)]
        assert len(shares) == 4
        assert min(shares) <= float(sizes[column].removesuffix("%")) <= max(shares)
    assert sum(float(line.split()[1]) for line in times.splitlines()[1:]) == pytest.approx(
        seconds[0], abs=1
    )
    # 12 bytes of optimizer and 2 of parameters, of 32.76e9 and 31.99e9 of them.
    assert "checkpoint: 0.91 TB, 45 s at 20 GB/s" in rest
    (tmp_path / "plan.yaml").write_text(pasted.removeprefix("to paste:\n"))
    parallel = load_config(tmp_path / "plan.yaml").parallel
    assert [
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size or 1,
        parallel.data_parallel_size,
    ] == [int(n) for n in sizes[:4]]
    assert notes.startswith("not modelled:\n  - ")


SMALL = ["--model", "Qwen2.5-7B", "--gpus", "8", "--responses", "64", "--mini-batch", "32"]
ONE = ["--tp", "2", "--pp", "1", "--vllm-tp", "1", "--recompute", "full", "--max-tokens", "24576"]


def first_row(capsys, options):
    assert plan.main([*SMALL, *ONE, *options]) == 0
    return capsys.readouterr().out.split("\n\n")[1].splitlines()[1].split()


def test_options_reach_the_plan(capsys):
    plain = first_row(capsys, [])
    assert plain[:5] + plain[6:9] == ["2", "1", "1", "4", "1", "full", "24576", "yes"]
    for options in (["--tflops", "400"], ["--hbm", "1000"], ["--share", "matmul=.4"],
                    ["--response", "15000"], ["--gpu", "A100"], ["--prompt", "2000"],
                    ["--spread", "1"], ["--nvlink", "90"], ["--vllm-sequences", "2"],
                    ["--reference"], ["--reward-model", "Qwen2.5-7B"],
                    # The same sampled tokens, and observations beside them.
                    ["--max-response", "22480", "--response", "10240", "--turns", "8",
                     "--observations", "2000"]):  # fmt: skip
        assert int(first_row(capsys, options)[9]) > int(plain[9]), options
    assert first_row(capsys, ["--gpu", "H200", "--offload", "no"])[8] == "no"
    assert int(first_row(capsys, ["--no-critic"])[9]) < int(plain[9])
    assert first_row(capsys, ["--gpu-memory", "79.6GiB", "--vllm-share", "0.3"])[5] == "0.30"


def test_episodes_are_told_of(capsys):
    options = [*SMALL, *ONE, "--max-response", "8192", "--response", "2048"]
    assert plan.main(options) == 0
    assert "episodes" not in capsys.readouterr().out
    assert plan.main([*options, "--turns", "2.5", "--observations", "700"]) == 0
    job = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert job[-1].startswith("episodes: mean 2.5 turns, 700 tokens of observations; ")
    assert "mean 2048 tokens, at most 8192" in job[-2]
    assert plan.main([*options, "--turns", "2", "--carry-over", "4"]) == 2
    assert "carry_over_groups=4 must be 0 with episodes" in capsys.readouterr().err


def test_options_of_wires_that_a_single_node_has_not():
    """Every bandwidth reaches the cluster, and a data sheet has its own."""
    parser = argparse.ArgumentParser()
    plan.add_plan(parser)

    def cluster(*options):
        return plan.cluster_of(parser.parse_args([*HEAD, *options]))

    assert cluster("--gpu", "A100") == dataclasses.replace(
        cluster(),
        peak_tflops=312.0, memory_gb_per_second=2039, nvlink_gb_per_second=600,
        network_gb_per_second=25, pcie_gb_per_second=32, float32_tflops=19.5,
    )  # fmt: skip
    for option, field in (
        ("tflops", "peak_tflops"),
        ("hbm", "memory_gb_per_second"),
        *((name, f"{name}_gb_per_second") for name in ("nvlink", "network", "pcie", "storage")),
    ):
        assert cluster(f"--{option}", "7") == dataclasses.replace(cluster(), **{field: 7.0})
    assert cluster("--share", "pcie=.5") == dataclasses.replace(cluster(), pcie_share=0.5)


def test_more_rows_in_detail(capsys):
    options = [*SMALL, "--tp", "2", "--pp", "1", "--recompute", "full", "--details", "2"]
    assert plan.main(options) == 0
    out = capsys.readouterr().out
    assert out.count("  actor_update  ") == 2 * 2 and out.count("to paste:") == 1
    # Without a critic half of the state is kept, on hosts and on disks.
    # 8 GPUs of a TP 2 x DP 4 layout: 2 + 12 / 4 bytes of half of 7.62e9 and 7.07e9 parameters.
    assert out.count("checkpoint: 0.21 TB") == out.count("host memory: 294 GB") == 2
    # It would fit without offload, too.
    assert plan.main([*options, "--no-critic", "--offload", "yes"]) == 0
    out = capsys.readouterr().out
    assert out.count("checkpoint: 0.11 TB") == out.count("host memory: 152 GB") == 2


def test_little_host_memory_means_no_offload(capsys):
    # A checkpoint: two of the GPUs copy 14 bytes of half of 7.62e9 + 7.07e9 parameters, the others
    # hold 12 bytes of half of 7.62e9 for a moment; all of them where nothing is copied.
    assert first_row(capsys, ["--host-memory", "774GB"])[8] == "yes"
    assert first_row(capsys, ["--gpu", "H200", "--host-memory", "773GB"])[8] == "no"
    assert plan.main([*SMALL, *ONE, "--offload", "yes", "--host-memory", "773GB"]) == 2
    # vLLM's lists of 8 responses of 20480 tokens, 260 bytes each, and their arrays, on 8 GPUs.
    parts = "offload needs 293.7 GB, a checkpoint 479.8 and a step's responses 0.4"
    needed = f"{parts} of a node's 773.0 GB of host memory"
    assert f"{needed}; with checkpoint.asynchronous=false 659.6" in capsys.readouterr().err


def test_a_configuration_file_is_the_workload(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "parallel: {world_size: 64, tensor_model_parallel_size: 8}\n"
        "rollout: {max_response_tokens: 1000, max_prompt_tokens: 100}\n"
        "algorithm: {responses_per_step: 128, mini_batch_size: 64, group_size: 8}\n"
    )
    options = ["--model", "Qwen2.5-7B", "--gpus", "8", "--config", str(file), "--top", "1"]
    assert plan.main(options) == 0
    out = capsys.readouterr().out
    assert "128 responses in groups of 8, mean 500 tokens, at most 1000; prompts of 100" in out
    assert "world_size: 8\n" in out and "slower (--top" in out


def test_some_gpus_only_sample(capsys, tmp_path):
    """The split is searched; the sentence compares with the colocated plan of the same options."""
    options = [*SMALL, *ONE[:2], *ONE[6:]]
    assert plan.main([*options, *APART.split()]) == 0
    out = capsys.readouterr().out
    columns, row = out.split("\n\n")[1].splitlines()[:2]
    assert columns.startswith("train  sample  train idle  sample idle  TP  PP  VPP  DP  vLLM")
    cells = row.split()
    assert int(cells[0]) + int(cells[1]) == 8 and int(cells[7]) * int(cells[4]) == int(cells[0])
    line = next(line for line in out.splitlines() if line.startswith("lag 1 on 8 GPUs: "))
    apart, colocated = (int(n) for n in re.findall(r"(\d+) s", line))
    assert int(cells[13]) == apart
    assert f" {cells[0]} GPUs train and {cells[1]} sample, lag 1: in a step " in out
    assert plan.main(options) == 0
    assert int(capsys.readouterr().out.split("\n\n")[1].splitlines()[1].split()[9]) == colocated
    # A file says the same, and its split is ignored as its layout is.
    file = tmp_path / "run.yaml"
    file.write_text("rollout: {placement: disaggregated, num_processes: 3, lag: 1}\n")
    assert plan.main([*options, "--config", str(file)]) == 0
    # A file has no overlap of gradients unless it says so.
    assert f"\n{columns}\n" in capsys.readouterr().out
    assert plan.main([*options, "--config", str(file), "--samplers", "4", "--lag", "0"]) == 0
    out = capsys.readouterr().out
    assert "4 GPUs train and 4 sample, lag 0" in out and "num_processes: 4\n  lag: 0\n" in out
    assert plan.main([*options, "--config", str(file), "--placement", "colocated"]) == 0
    assert "lag" not in capsys.readouterr().out.split("not modelled")[0]


def test_nothing_fits(capsys):
    """Reasons and bytes are printed, and one line says what it comes to."""
    assert plan.main([*SMALL, "--gpu-memory", "4GB", "--pp", "1"]) == 2
    out, error = capsys.readouterr()
    assert "rejected:\n" in out and "\n  TP 1 x PP 1: actor_update needs " in out
    title, _, columns, *phases = out.split("closest: ")[1].splitlines()
    # 28 heads: TP 8 does not divide; TP 4 has most room.
    assert title == "TP 4 x PP 1, recompute full, offload yes"
    assert columns.endswith("of 4") and len(phases) == 6
    most = max(float(line.split()[-1]) for line in phases)
    assert re.match(
        rf"plan: nothing fits into 8 GPUs of 4 GB; the closest, TP 4 x PP 1: \S+ needs {most} GB",
        error,
    )
    assert error.count("\n") == 1
    assert plan.main([*SMALL, "--tp", "3"]) == 2
    out, error = capsys.readouterr()
    assert "world_size=8 must be divisible by tensor_model" in out
    assert error.startswith("plan: no layout divides 8 GPUs") and error.count("\n") == 1


RESHARD = "reshard --tp 8 --pp 4 --vllm-tp 8 --model"
APART = "--placement disaggregated --lag 1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (f"{RESHARD} Qwen9", "model 'Qwen9' must be one of Qwen2.5-0.5B"),
        (f"{RESHARD} Qwen2.5-0.5B", "must divide the model's num_attention_heads=14"),
        (f"{RESHARD} Qwen2.5-32B --nodes 3", "multiple of --tp=8 * --pp=4"),
        (f"{RESHARD} Qwen2.5-32B --vllm-tp 3", "rollout.tensor_model"),
        (f"{RESHARD} Qwen2.5-7B --tp 4 --pp 1 --vpp 2", "--vpp=2 must be 1 with --pp=1"),
        (f"{RESHARD} Qwen2.5-32B --nodes 0", "argument --nodes: 0 must be at least 1"),
        (f"{RESHARD} Qwen2.5-32B --network 0", "argument --network: 0.0 must be more than 0"),
        ("--lag 1", "rollout.lag=1 needs rollout.placement=disaggregated, found colocated"),
        ("--samplers 3", "rollout.num_processes=3 needs rollout.placement=disaggregated"),
        (f"{APART} --samplers 8", "--samplers=8 must be less than --gpus=8: others train"),
        (f"{APART} --gpus 1", "--placement=disaggregated needs --gpus of at least 2, found 1"),
        (f"{APART} --samplers 3 --vllm-tp 2", "size=2 must divide rollout.num_processes=3 and"),
        (f"{APART} --reward-model Qwen2.5-7B", "must not be combined with model.reward_hf"),
        ("--model Qwen9", "model 'Qwen9' must be one of"),
        ("--model /no/where/config.json", "--model=/no/where does not exist; set"),
        ("--gpus 12", "--gpus=12 must be a multiple of --gpus-per-node=8"),
        ("--gpus 99999999999", "--gpus=99999999999 must be at most 1000000; correct it"),
        ("--responses 100", "responses_per_step=100 must be divisible by"),
        ("--response 30000", "a mean response of 30000 tokens must lie between 1 and"),
        ("--vllm-tp 3", "rollout.tensor_model_parallel_size=3 must divide"),
        ("--vllm-tp 16", "must divide parallel.world_size=8"),
        ("--pp 1 --vpp 2", "needs parallel.pipeline_model_parallel_size > 1"),
        ("--config nowhere.yaml", "config file nowhere.yaml: No such file"),
        ("--gpu-memory 80", "'80' must read like 80GB, 141GB or 79.6GiB"),
        ("--gpu-memory 0GB", "'0GB' must be more than 0"),
        ("--gpu-memory '80 parsecs'", "must read like 80GB"),
        ("--gpus many", "'many' must be a whole number"),
        ("--hbm fast", "'fast' must be a number"),
        ("--hbm inf", "inf must be more than 0"),
        ("--share matmul=2", "'matmul=2' must read NAME=X with X in (0, 1]"),
        ("--share luck=.5", "NAME one of matmul, attention"),
        ("--vllm-share 1.5", "1.5 must be at most 1"),
        ("--lag -1", "-1 must be at least 0"),
        ("--placement apart", "invalid choice: 'apart'"),
        ("--recompute some", "invalid choice: 'some'"),
        ("model.lora.rnk=8", "model.lora.rnk"),
        ("parallel.tensor_model_parallel_size=2", "size=2 is searched over, or set by an option"),
        ("--group-size 8 algorithm.group_size=8", "algorithm.group_size=8 is searched over, or"),
        ("model.lora.rank=8 model.lora.roles=[critic] optimizer.critic_method=dion", "be adamw"),
    ],
)
def test_a_mistake_is_one_line(capsys, options, message):
    arguments = shlex.split(options)
    assert plan.main([*([] if "reshard" in arguments else SMALL), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plan: ") and message in error and error.count("\n") == 1


def test_sizes():
    assert plan_options.size("80GB") == 80 * 10**9
    assert plan_options.size("1.5 tb") == 15 * 10**11 and plan_options.size("2GiB") == 2 * 2**30


def test_adapters_are_planned_by_an_override(capsys, tmp_path):
    """Before or behind options; 32B does not fit one node without them."""
    job = ["--model", "Qwen2.5-32B", "--gpus", "8", "--tp", "8", "--pp", "1", "--vllm-tp", "8"]
    assert plan.main(job) == 2
    assert "shorter sequences, set model.lora.rank=32, or fix" in capsys.readouterr().err
    assert plan.main(["model.lora.rank=32", *job, "algorithm.group_size=8"]) == 0
    out = capsys.readouterr().out
    assert "in groups of 8" in out and "  actor: adapters of rank 32, " in out
    columns = next(line for line in out.splitlines() if line.startswith("  GB  "))
    assert columns.split()[1:3] == ["params", "base"]
    assert "what the host takes to start the adapters' kernels" in out
    file = tmp_path / "plan.yaml"
    file.write_text(out.split("to paste:\n")[1].split("\n\n")[0])
    assert load_config(file).model.lora.rank == 32
    assert plan.main([*job, "--config", str(file), "--top", "1"]) == 0
    assert "  actor: adapters of rank 32, " in capsys.readouterr().out


def test_fp8_keys_and_recomputed_layers_are_planned_and_pasted(capsys):
    job = [
        "--model",
        "Qwen2.5-32B",
        "--gpus",
        "128",
        *LAYOUT,
        "--vpp",
        "1",
        "--max-tokens",
        "22528",
    ]
    assert plan.main([*job, "--recompute-layers", "6", "--kv-cache-dtype", "fp8"]) == 0
    out = capsys.readouterr().out
    assert "recompute full, block 6, vLLM TP 8" in out
    for line in ("recompute_method: block", "recompute_num_layers: 6", "kv_cache_dtype: fp8"):
        assert f"  {line}\n" in out
    assert plan.main([*job, "--recompute-layers", "6", "--recompute", "none"]) == 2
    assert "--recompute-layers=6 needs --recompute=full, found none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpu", "line"),
    [
        ("B200", "GPU: 180 GB, 2250 TFLOP/s, memory 8000 GB/s, NVLink 1800, network 50, PCIe 64"),
        ("B300", "GPU: 288 GB, 2250 TFLOP/s, memory 8000 GB/s, NVLink 1800, network 100, PCIe 64"),
    ],
)
def test_blackwell(capsys, gpu, line):
    assert plan.main(["--model", "Qwen2.5-0.5B", "--gpus", "1", "--gpu", gpu]) == 0
    assert line in capsys.readouterr().out
