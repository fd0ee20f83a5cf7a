"""A user's mistakes: one line with the remedy and exit code 2, before torchrun and on every rank.

The command runs in this process, up to where it would build the trainer; torchrun is real where it
is named. Not exercised: mistakes that only vLLM can find (tests/e2e/test_run.py), what each single
message says (the tests of each room).
"""

import concurrent.futures
import errno
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import types
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.rollout.tiny_tokenizer import write_tiny_tokenizer
from tests.sealed import seal
from tests.weights.tiny_hf import write_tiny_hf, write_tiny_model, write_tiny_reward_model
from tests.workers import free_port
from tools import convert_hf_to_megatron
from vapo_megatron.cli.checks import answers, contents
from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.cli.evaluate import command as evaluate
from vapo_megatron.cli.train import main
from vapo_megatron.config import ParallelConfig, load_config
from vapo_megatron.data import lock
from vapo_megatron.data.problems import load_problems
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.data.rollout import Prompt, Rollout, ScoredRollout
from vapo_megatron.errors import DataError, UserError
from vapo_megatron.reward import checks
from vapo_megatron.rollout.dump import step_bytes
from vapo_megatron.run.output import RunOutput
from vapo_megatron.weights.convert.to_megatron import convert_to_megatron

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 64
DUMPED = "dumped/replay/step_000001/rank_00000.safetensors"
SIZES = {"num_layers": 2, "hidden": 128, "ffn": 32, "vocab": VOCABULARY}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """What a run reads, without a mistake."""
    place = tmp_path_factory.mktemp("good")
    write_tiny_model(place / "model", **SIZES)
    for name in ("train", "test"):
        rows = [json.dumps({"prompt": f"w{i}", "answer": i}) for i in range(3, 6)]
        (place / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return place


@pytest.fixture
def place(good, tmp_path):
    """A copy that a mistake can be made in, and the configuration that names it."""
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    sections = {
        "model": {"hf_path": f"{tmp_path}/model"},
        "data": {"train_path": f"{tmp_path}/train.jsonl"},
        "evaluation": {"path": f"{tmp_path}/test.jsonl"},
        "rollout": {"max_prompt_tokens": 8, "max_response_tokens": 8},
        "logging": {"run_dir": f"{tmp_path}/run"},
        "parallel": {"world_size": 2},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(sections))
    return tmp_path


@pytest.fixture(autouse=True)
def no_progress(monkeypatch):
    """A slow machine has nothing else to say either."""
    for module in (answers, contents):
        monkeypatch.setattr(module, "ProgressBar", partial(ProgressBar, after_seconds=3600))


def append(name, text):
    """Add a line to a file."""

    def change(place):
        with (place / name).open("a") as file:
            file.write(text + "\n")

    return change


def put(name, **content):
    """Change a JSON file."""

    def change(place):
        file = place / name
        tree = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**tree, **content}))

    return change


def smaller_tokenizer(place):
    """Leave the tokenizer of a model that ends a text otherwise."""
    write_tiny_tokenizer(place / "model", 50)
    put("model/generation_config.json", eos_token_id=[2, 63])(place)


def other_weights(place):
    """Leave the weights of another model."""
    write_tiny_hf(place / "other", **{**SIZES, "ffn": 48})
    (place / "other/model.safetensors").replace(place / "model/model.safetensors")


def other_critic(place):
    """Make a critic of another model."""
    write_tiny_hf(place / "other", **{**SIZES, "hidden": 256})


def checkpoint(run, *, ffn=None, roles=("actor", "critic"), **data):
    """Make a run directory: with these sizes, roles and place in the data, without optimizers.

    ffn: of the weights; None: there are none.
    """

    def change(place):
        made, problems = place / run / "checkpoints/step_000001", place / "train.jsonl"
        made.mkdir(parents=True)
        if ffn is not None:
            source = write_tiny_hf(place / "other", **{**SIZES, "ffn": ffn})
            for role in roles:
                convert_to_megatron(source, made / role, ParallelConfig(), role)
        dataset = PromptDataset(
            load_problems(problems), lambda text: [1],
            path=str(problems), seed=0, shuffle=True, max_prompt_tokens=1,
        )  # fmt: skip
        state = {**dataset.state_dict(), **data} if data != {"of": "a replay"} else {}
        content = {"step": 1, "num_updates": dict.fromkeys(roles, 2), "run": {"data": state}}
        (made / "state.json").write_text(json.dumps(content))
        seal(made)

    return change


def dump(vocab_size=VOCABULARY, **sizes):
    """Leave a run directory with the first step's responses, of a model with these token ids."""

    def change(place):
        sizes_of = {"num_responses": 4, "group_size": 2, **sizes}
        prompts = [Prompt(i, "w3", (3, vocab_size - 1), "5") for i in (0, 0, 1, 1)]
        scored = [
            ScoredRollout(Rollout(p, i % 2, i, (4, 2), (-1.0, -1.0), False, 0), "w4", "wrong", 0.0)
            for i, p in enumerate(prompts)
        ]
        file = place / DUMPED
        file.parent.mkdir(parents=True)
        file.write_bytes(step_bytes(scored, 1, **sizes_of))

    return change


def cut_short(place):
    """Leave the weights half fetched."""
    os.truncate(place / "model/model.safetensors", 20_000)


def nothing(place):
    """No file is wrong."""


def reward_model(**sizes):
    """Leave a reward model with the actor's tokenizer."""

    def change(place):
        write_tiny_reward_model(place / "reward", **{**SIZES, **sizes})
        shutil.copy(place / "model/tokenizer.json", place / "reward")

    return change


SCORED = ["model.reward_hf_path={place}/reward", "reward.verifier=reward_model"]
REPLAY = [
    "--replay", "{place}/dumped", "algorithm.responses_per_step=4", "algorithm.group_size=2",
    "algorithm.mini_batch_size=4", "algorithm.value_pretraining_steps=0",
    "algorithm.policy_steps=1",
]  # fmt: skip
# what: (what is done to the files, overrides, words of the message)
MISTAKES = {
    "unknown key": (nothing, ["algorithm.gama=1"], "did you mean algorithm.gamma?"),
    "wrong type": (nothing, ["algorithm.group_size=x"], "group_size='x' must be a valid integer"),
    "no argument of vLLM": (
        nothing, ["rollout.vllm_args={{max_num_batched_token: 64}}"],
        "rollout.vllm_args: the installed vLLM's engine has no argument max_num_batched_token; did",
    ),
    "layout": (
        nothing,
        ["parallel.world_size=3", "parallel.tensor_model_parallel_size=3"],
        "tensor_model_parallel_size=3 must divide the model's num_attention_heads=4",
    ),
    "lengths": (nothing, ["rollout.max_response_tokens=600"], "max_position_embeddings=512; lower"),
    "no model": (nothing, ["model.hf_path=/nowhere"], "model.hf_path=/nowhere does not exist; set"),
    "model on the hub": (
        nothing, ["model.hf_path=Qwen/Qwen2.5-7B"],
        "run `hf download Qwen/Qwen2.5-7B --local-dir models/Qwen2.5-7B` and set model.hf_path=mo",
    ),
    "critic on the hub": (
        nothing, ["model.critic_hf_path=Qwen/Qwen3-4B"], "and set model.critic_hf_path=models/Qw",
    ),
    "data on the hub": (
        nothing, ["data.train_path=openai/gsm8k"], "run `vapo prepare --data openai/gsm8k --tok",
    ),
    "head size": (
        lambda place: write_tiny_hf(place / "model", **{**SIZES, "hidden": 64}), [],
        "model: config.json: head_dim=16 (hidden_size / num_attention_heads where it is not set) "
        "must be one of 32, 64, 80, ",
    ),
    "quantization that is left": (
        put("model/config.json", quantization_config={"quant_method": "fp8"}), [],
        "model/config.json: quantization_config={{'quant_method': 'fp8'}}: only null is",
    ),
    "key that only vLLM obeys": (
        put("model/config.json", is_causal=False), [],
        "model/config.json: is_causal=False: only True is supported: ",
    ),
    "no data": (nothing, ["data.train_path=/a.jsonl"], "train_path=/a.jsonl does not exist; set"),
    "no held-out data": (nothing, ["evaluation.path=/a.jsonl"], "evaluation.path=/a.jsonl does"),
    "no critic": (nothing, ["model.critic_hf_path=/nowhere"], "critic_hf_path=/nowhere does not"),
    "no reward model": (
        nothing, [*SCORED, "model.reward_hf_path=/nowhere"],
        "model.reward_hf_path=/nowhere does not exist; set model.reward_hf_path",
    ),
    "reward model with other tokens": (
        reward_model(vocab=70), SCORED,
        "reward: its vocab_size=70 must be 64, as in model.hf_path=",
    ),
    "reward model with another tokenizer": (
        lambda place: (
            reward_model()(place), write_tiny_tokenizer(place / "reward", VOCABULARY, last=["x"]),
        ),
        SCORED, "in tokenizer.json id 63 is 'x', but 'w63' in model.hf_path's tokenizer",
    ),
    "reward model that TP does not divide": (
        reward_model(heads=1, kv_heads=1), [*SCORED, "parallel.tensor_model_parallel_size=2"],
        "reward: parallel.tensor_model_parallel_size=2 must divide the model's num_attention_heads",
    ),
    "reward model without a label": (
        lambda place: write_tiny_hf(place / "reward", **SIZES), SCORED,
        "model.reward_hf_path={place}/reward: {place}/reward does not hold the reward_model that "
        "config.json describes: score.weight is missing",
    ),
    "reward model without rows": (
        reward_model(), [*SCORED, "reward.verifier=math"],
        "reward would score nothing: all rows of {place}/train.jsonl are judged by math; set",
    ),
    "malformed line": (append("train.jsonl", '{"prompt": '), [], "train.jsonl, line 4 is not JSON"),
    "malformed held-out line": (append("test.jsonl", "x"), [], "test.jsonl, line 4 is not JSON"),
    "no text": (
        append("train.jsonl", '{"prompt": "\\ud800", "answer": 1}'), [],
        "line 4: prompt contains half of a surrogate pair, which is not valid Unicode; correct",
    ),
    "chat without a template": (
        append("train.jsonl", '{"prompt": [{"role": "user", "content": "w1"}], "answer": 1}'), [],
        "train.jsonl, line 4: prompt has chat messages, but the tokenizer has no chat template; "
        "correct or remove the row, use the tokenizer of a chat model, or make all prompts texts",
    ),
    "no file of a source": (
        nothing, ["data.train_path=null", "data.sources.math.path=/a.jsonl"],
        "data.sources.math.path=/a.jsonl does not exist; set data.sources.math.path to an",
    ),
    "missing column of a source": (
        nothing,
        [
            "data.train_path=null", "data.sources.math.path={place}/train.jsonl",
            "data.sources.math.prompt_column=question",
        ],
        "train.jsonl, line 1 has no column 'question'; set data.sources.math.prompt_column to one",
    ),
    "missing column": (
        nothing, ["data.answer_column=solution"],
        "train.jsonl, line 1 has no column 'solution'; set data.answer_column to one of those it "
        "has: prompt, answer",
    ),
    "empty data": (
        lambda place: (place / "train.jsonl").write_text("\n"), [],
        "train.jsonl has no problems; give a file with at least one row",
    ),
    "long prompt": (
        append("train.jsonl", '{"prompt": "w1 w2 w3 w4 w5 w6 w7 w8 w9", "answer": 1}'), [],
        "train.jsonl: problem 3 (from 0) has 9 tokens, more than rollout.max_prompt_tokens=8: 'w1",
    ),
    "long held-out prompt": (
        append("test.jsonl", '{"prompt": "w1 w2 w3 w4 w5 w6 w7 w8 w9", "answer": 1}'), [],
        "test.jsonl: problem 3 (from 0) has 9 tokens, more than rollout.max_prompt_tokens=8: 'w1",
    ),
    "no dump": (nothing, ["--replay", "{place}"], "{place} has no dumped steps; give a run dir"),
    "dump of another model": (
        dump(VOCABULARY + 6), REPLAY,
        "rank_00000.safetensors has token id 69, outside the vocabulary of 64; set model.hf_path",
    ),
    "dump of another configuration": (
        dump(group_size=4), REPLAY,
        "was dumped with 4, but algorithm.group_size=2; set algorithm.group_size=4",
    ),
    "dump of fewer steps": (
        dump(), [*REPLAY, "algorithm.policy_steps=3"],
        "replay has step 1, but the run needs steps 2, 3 too; lower algorithm.policy_steps",
    ),
    "damaged dump": (
        lambda place: (dump()(place), os.truncate(place / DUMPED, 100)), REPLAY,
        "rank_00000.safetensors cannot be read (",
    ),
    "unreadable data": (
        lambda place: (place / "mem.jsonl").symlink_to("/proc/self/mem"),
        ["data.train_path={place}/mem.jsonl"],
        "mem.jsonl cannot be read: Input/output error; make it readable",
    ),
    "stop token outside": (
        nothing, ["rollout.stop_token_ids=[64]"], "[64] are outside the model's vocabulary of 64",
    ),
    "no tokenizer": (
        lambda place: (place / "model/tokenizer.json").unlink(), [], "no tokenizer; the directory",
    ),
    "tokenizer too large": (
        lambda place: write_tiny_tokenizer(place / "model", VOCABULARY + 1), [],
        "its tokenizer has token id 64 ('w64'), outside config.json's vocab_size=64; put",
    ),
    "tokenizer of another": (
        smaller_tokenizer, [],
        "generation_config.json has eos_token_id=63, which its tokenizer lacks (the "
        "largest id is 49); put the model's own tokenizer there",
    ),
    "config.json": (
        put("model/config.json", rms_norm_eps="tiny"), [],
        "model/config.json: rms_norm_eps='tiny': must be a positive number",
    ),
    "weights of another model": (
        other_weights, [],
        "does not hold the actor that config.json describes: model.layers.0.mlp.gate_proj.weight: "
        "expected shape [32, 128], found [48, 128]",
    ),
    "damaged weights": (cut_short, [], "model.safetensors cannot be read as safetensors ("),
    "critic of another model": (
        other_critic, ["model.critic_hf_path={place}/other"],
        "model.embed_tokens.weight: expected shape [64, 128], found [64, 256]",
    ),
    "checkpoint of another model": (
        checkpoint("run", ffn=48), [],
        "run/checkpoints/step_000001/actor does not hold the actor that config.json describes: "
        "decoder.layers.mlp.linear_fc1.weight: expected shape [2, 64, 128], found [2, 96, 128]",
    ),
    "checkpoint of another optimizer": (
        checkpoint("run", ffn=32), [],
        "logging.run_dir={place}/run: the state of its actor's optimizer does not fit this run's "
        "parallel.use_distributed_optimizer=True, model.dtype=",
    ),
    "critic checkpoint without an optimizer": (
        checkpoint("values", ffn=32), ["model.critic_checkpoint={place}/values"],
        "or take its weights alone with model.critic_checkpoint_optimizer=false",
    ),
    "checkpoint of other roles": (
        checkpoint("run", roles=["critic"]), [],
        "step_000001 holds critic, but this configuration trains actor and critic (algorithm.stage",
    ),
    "checkpoint of a replay": (
        checkpoint("run", of="a replay"), [], "was written by a replay, which has no position in",
    ),
    "checkpoint of one file": (
        checkpoint("run"),
        ["data.train_path=null", "data.sources.a.path={place}/train.jsonl"],
        "cannot resume the data: data.sources were none when the checkpoint was written and are a",
    ),
    "checkpoint of other data": (
        checkpoint("run", seed=7), [],
        "its seed was 7 when the checkpoint was written and is 0 now; restore it, or start another",
    ),
    "critic checkpoint of another model": (
        checkpoint("values", ffn=48), ["model.critic_checkpoint={place}/values"],
        "step_000001/critic does not hold the critic that config.json describes",
    ),
    "critic checkpoint of another range": (
        checkpoint("values", ffn=32),
        [
            "model.critic_checkpoint={place}/values", "algorithm.value_range=[-1.5, 1]",
        ],
        "algorithm.value_range=null, which algorithm.value_range=[-1.5, 1.0] must equal: the same",
    ),
    "checkpoint of another range": (
        checkpoint("run", ffn=32),
        ["algorithm.value_range=[-1.5, 1]"],
        "logging.run_dir={place}/run (step_000001): its critic was trained with algorithm.value_r",
    ),
    "checkpoint of whole weights": (
        checkpoint("run", ffn=32), ["model.lora.rank=4"],
        "actor holds whole weights of the actor, which model.lora.rank=4 does not train; use the "
        "settings of the run that wrote it\n",
    ),
    "critic checkpoint without a critic": (
        nothing, ["model.critic_checkpoint={place}"], "holds no critic; set it to a run directory",
    ),
    "run directory": (
        append("file", ""), ["logging.run_dir={place}/file/run"],
        "/file is no directory; set another directory",
    ),
    "run directory whose checkpoints are a file": (
        lambda place: (place / "run").mkdir() or append("run/checkpoints", "")(place), [],
        "run/checkpoints is no directory; set another directory",
    ),
    "run directory of a home": (
        nothing, ["logging.run_dir=~/runs"],
        "logging.run_dir=~/runs: ~ is not expanded here, and would become a directory of that name",
    ),
    "run directory with a long name": (
        nothing, [f"logging.run_dir={{place}}/{300 * 'x'}"],
        "File name too long: '{place}/xxxxx",
    ),
    "run directory that cannot be": (
        nothing, ['logging.run_dir="{place}/\\0"'], "embedded null",
    ),
    "run directory behind a link to nothing": (
        lambda place: (place / "run").symlink_to("/nowhere/run"), [],
        "run is no directory; set another directory",
    ),
}  # fmt: skip
# What the verifier finds: by itself in a dry run, shared by a run's ranks when they have met.
OF_VERIFIER = {
    "no answer": (
        append("train.jsonl", '{"prompt": "w1", "answer": " "}'), [],
        "train.jsonl: row 3 (from 0) has no ground truth; correct or remove the row",
    ),
    "held-out rows of the reward model": (
        reward_model(), SCORED,
        "test.jsonl: row 2 (from 0) is judged by reward_model, which scores training responses "
        "only: an evaluation needs another verifier, in the row's column `verifier`; correct or",
    ),
    "rows of a reward model that there is not": (
        append("train.jsonl", '{"prompt": "w1", "answer": "7", "verifier": "reward_model"}'), [],
        "train.jsonl: row 3 (from 0) is judged by reward_model, but model.reward_hf_path=null;",
    ),
    "unreadable answer": (
        append("train.jsonl", '{"prompt": "w1", "answer": "??"}'), [],
        "train.jsonl: row 3 (from 0) has the answer '??', which the verifier cannot parse; correct",
    ),
    "unreadable answer of a source": (
        append("test.jsonl", '{"prompt": "w1", "answer": "??"}'),
        [
            "data.train_path=null", "data.sources.a.path={place}/train.jsonl",
            "data.sources.b.path={place}/test.jsonl", "evaluation.path=null",
        ],
        "test.jsonl: row 3 (from 0) has the answer '??', which the verifier cannot parse; correct",
    ),
    "unreadable held-out answer": (
        append("test.jsonl", '{"prompt": "w1", "answer": "??"}'), [],
        "test.jsonl: row 3 (from 0) has the answer '??', which the verifier cannot parse; correct",
    ),
}  # fmt: skip
# Mistakes in files that tools read, too.
OF_TOOLS = {
    convert_hf_to_megatron: [
        "config.json", "weights of another model", "damaged weights", "quantization that is left",
        "key that only vLLM obeys",
    ],
    evaluate: [
        "malformed line", "no text", "missing column", "empty data", "unreadable data",
        "no tokenizer", "tokenizer too large", "tokenizer of another", "stop token outside",
        "head size", "quantization that is left", "key that only vLLM obeys",
    ],
}  # fmt: skip


def make(name, place):
    """Make a mistake; return the overrides that go with it and the words that it is told in."""
    change, overrides, words = {**MISTAKES, **OF_VERIFIER}[name]
    change(place)
    return [text.format(place=place) for text in overrides], words.format(place=place)


@pytest.fixture(params=MISTAKES)
def mistake(request, place):
    """A mistake that has been made: the command's arguments, and the words."""
    overrides, words = make(request.param, place)
    return ["--config", str(place / "config.yaml"), *overrides], words


def as_rank(monkeypatch, rank, place, world_size=2):
    """Give this process the environment of a rank, and no trainer."""

    def stop(*_):
        raise AssertionError("the trainer was reached")

    trainer = types.SimpleNamespace(VapoTrainer=stop)
    monkeypatch.setitem(sys.modules, "vapo_megatron.training.loop", trainer)
    own = place / f"attempt_0/{rank}"
    own.mkdir(parents=True)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(rank))
    for name, value in {
        "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
        "TORCHELASTIC_ERROR_FILE": str(own / "error.json"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


@pytest.fixture
def before_torchrun(monkeypatch):
    """Check a command line in this process; where nothing is wrong, raise in place of torchrun."""
    for name in ("LOCAL_RANK", "NNODES", "NPROC_PER_NODE"):
        monkeypatch.delenv(name, raising=False)

    def stop(*_):
        raise AssertionError("torchrun was reached")

    monkeypatch.setattr(os, "execv", stop)
    return lambda arguments: main(arguments, worker=["a worker"])


def test_one_process_tells_a_mistake(mistake, before_torchrun, capsys):
    arguments, words = mistake
    told = []
    for started in (lambda: main([*arguments, "--dry-run"]), lambda: before_torchrun(arguments)):
        assert started() == 2
        told.append(capsys.readouterr())
    assert told[0] == told[1], "a dry run and a start"
    assert told[0].out == "", "no plan of what is refused"
    error = told[0].err
    assert error.startswith("error: ") and error.count("\n") == 1 and words in error


def test_a_dry_run_advises(place, before_torchrun, capsys):
    dry = ["--config", str(place / "config.yaml"), "--dry-run", "model.dtype=bfloat16"]
    assert main([*dry, "rollout.kv_cache_dtype=fp8"]) == 0
    assert "warning: rollout.kv_cache_dtype=fp8 moves the engine" in capsys.readouterr().err
    assert main(dry) == 0
    assert "kv_cache_dtype" not in capsys.readouterr().err


def test_a_disk_without_room_for_a_checkpoint(place, before_torchrun, monkeypatch, capsys):
    """A dry run and a start refuse it; a dry run also warns of what is kept."""
    arguments = ["--config", str(place / "config.yaml")]
    usage = types.SimpleNamespace(total=10**9, free=10**5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    for started in (lambda: main([*arguments, "--dry-run"]), lambda: before_torchrun(arguments)):
        assert started() == 2
        told = capsys.readouterr()
        assert told.out == "" and told.err.count("\n") == 1
        assert told.err.startswith("error: a checkpoint takes 0.00") and "0.0001 GB are" in told.err
    usage.free = 10**7
    assert main([*arguments, "--dry-run"]) == 0
    assert "\n# warning: the run keeps up to 3 checkpoints of 0.00" in capsys.readouterr().out


@pytest.mark.parametrize("name", OF_VERIFIER)
def test_a_dry_run_tells_what_the_verifier_finds(name, place, capsys):
    overrides, words = make(name, place)
    assert main(["--config", str(place / "config.yaml"), *overrides, "--dry-run"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and words in told.err


def test_a_launch_reads_the_first_ground_truths(place, before_torchrun, monkeypatch, capsys):
    """Its ranks read the others, which may be many."""
    overrides, words = make("rows of a reward model that there is not", place)
    arguments = ["--config", str(place / "config.yaml"), *overrides]
    assert before_torchrun(arguments) == 2
    assert words in capsys.readouterr().err
    monkeypatch.setattr(answers, "_FIRST_ANSWERS", 3)
    with pytest.raises(AssertionError, match="torchrun was reached"):
        before_torchrun(arguments)


def test_every_rank_refuses_and_one_tells(mistake, place, monkeypatch, capsys):
    arguments, words = mistake
    for rank in (1, 0):
        as_rank(monkeypatch, rank, place)
        if "parallel.world_size=3" in arguments:
            monkeypatch.setenv("WORLD_SIZE", "3")
        assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and words in told


@pytest.mark.parametrize(
    "tool,name", [(t, name) for t, names in OF_TOOLS.items() for name in names]
)
def test_tools_tell_it_alike(tool, name, place, capsys):
    overrides, words = make(name, place)
    data = [o.split("=")[1] for o in overrides if o.startswith("data.train_path=")]
    arguments = ["--hf", place / "model", "--out", place / "converted"]
    if tool is evaluate:
        data = data or [place / "train.jsonl"]
        arguments = ["--checkpoint", place / "model", "--data", data[0], "--out", place / "out"]
        arguments += [o for o in overrides if not o.startswith("data.train_path=")]
    assert tool.main([str(argument) for argument in arguments]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and words in told
    assert not (place / "converted").exists() and not (place / "out").exists()


def test_without_a_mistake_there_is_nothing_to_tell(place, before_torchrun, monkeypatch, capsys):
    arguments = ["--config", str(place / "config.yaml")]
    assert main([*arguments, "--dry-run"]) == 0
    with pytest.raises(AssertionError, match="torchrun was reached"):
        before_torchrun(arguments)
    assert not (place / "run").exists(), "neither writes anything"
    as_rank(monkeypatch, 0, place)
    with pytest.raises(AssertionError, match="the trainer was reached"):
        main(arguments)
    assert capsys.readouterr().err == ""


def test_a_long_check_shows_how_far_it_is(place, monkeypatch, capsys):
    for module in (answers, contents):
        always = partial(ProgressBar, after_seconds=0, every_seconds=3600)
        monkeypatch.setattr(module, "ProgressBar", always)
    monkeypatch.setattr(checks, "_ROWS_AT_ONCE", 2)
    assert main(["--config", str(place / "config.yaml"), "--dry-run"]) == 0
    lines = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "prompts 1 / 3", "prompts 3 / 3",
        "ground truths 0 / 3", "ground truths 3 / 3", "ground truths 0 / 3", "ground truths 3 / 3",
    ]  # fmt: skip


def test_two_runs_do_not_share_a_directory(place, before_torchrun, monkeypatch, capsys):
    """Neither before a run has begun nor, should two begin at once, when it would write."""
    arguments, run_dir = ["--config", str(place / "config.yaml")], place / "run"
    elsewhere = load_config(arguments[1], [f"logging.run_dir={place}/file/run"])
    output = RunOutput(load_config(arguments[1]), types.SimpleNamespace(rank=0))
    # At once: a test that waits ends by its own limit.
    monkeypatch.setattr(lock, "LOCK_SECONDS", 3600.0)
    with lock.lock_run(run_dir):
        assert before_torchrun(arguments) == 2
        before = capsys.readouterr()
        assert main([*arguments, "--dry-run"]) == 2
        assert capsys.readouterr() == before and before.out == ""
        for rank in (1, 0):
            as_rank(monkeypatch, rank, place)
            assert main(arguments) == 2
        with pytest.raises(DataError) as error, output.opened(0):
            raise AssertionError("it goes on")
        assert [path.name for path in run_dir.iterdir()] == [".lock"]
        with pytest.raises(UserError, match="file/run cannot be written: Not a directory; fix"):
            (place / "file").touch()
            with RunOutput(elsewhere, types.SimpleNamespace(rank=0)).opened(0):
                raise AssertionError("it goes on")
        told = capsys.readouterr().err
        who = f"(process {os.getpid()} on {socket.gethostname()}, since 20"
        assert told == f"error: {error.value}\n" and "); stop that run" in told and who in told
        assert before.err == told
    with output.opened(0), pytest.raises(DataError), lock.locked(run_dir / ".lock", "no"):
        raise AssertionError("it is not locked")
    assert not (run_dir / ".lock").exists()


def test_what_is_ending_is_waited_for_aloud(tmp_path, monkeypatch, capsys):
    """A run whose torchrun is gone, one that was told to end, and one on another machine."""
    monkeypatch.setattr(lock, "_QUIET_SECONDS", 0.0)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    code = "import signal as s; s.pthread_sigmask(s.SIG_BLOCK, [15]); print(flush=True); s.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as told:
        told.stdout.readline()
        told.terminate()
        for i, change in enumerate(({"agent": gone.pid}, {"pid": told.pid}, {"host": "other"})):
            held = lock.lock_run(tmp_path / str(i))
            held.__enter__()
            holder = {**lock._this_process(), **change}
            (tmp_path / f"{i}/.lock").write_text(json.dumps(holder))
            threading.Timer(0.5, held.__exit__, (None, None, None)).start()
            lock.check_not_in_use(tmp_path / str(i))
            line = f"waiting up to 30 s for {tmp_path}/{i}/.lock, which another run may still hold "
            assert capsys.readouterr().err == (
                f"{line}(process {holder['pid']} on {holder['host']}, since {holder['since']})\n"
            )
        told.kill()


def test_the_lock_of_a_killed_run_is_free_at_once_for_all_ranks(tmp_path, monkeypatch):
    code = (
        "import sys, vapo_megatron.data.lock as f\n"
        "with f.lock_run(f.Path(sys.argv[1])): print(flush=True), sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        run.stdout.readline()
        with pytest.raises(DataError, match=f"another run is using it .process {run.pid} on"):
            lock.check_not_in_use(tmp_path)
        run.kill()
    assert (tmp_path / ".lock").exists()
    monkeypatch.setattr(lock, "LOCK_SECONDS", 3600.0)
    with concurrent.futures.ThreadPoolExecutor(32) as ranks:
        for asked in [ranks.submit(lock.check_not_in_use, tmp_path) for _ in range(32)]:
            asked.result()
        with lock.lock_run(tmp_path):
            assert (tmp_path / ".lock").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_once_and_used(number, tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock.lock_run(tmp_path):
        told = capsys.readouterr().err
        assert (
            told.count("\n") == 1 and "does not support file locks: do not start a second" in told
        )


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_number_of_processes_is_checked_on_every_rank(world_size, place, monkeypatch, capsys):
    for rank in range(min(world_size, 2)):
        as_rank(monkeypatch, rank, place, world_size)
        assert main(["--config", str(place / "config.yaml")]) == 2
    told = capsys.readouterr().err
    words = f"parallel.world_size=2 must be the number of processes started, {world_size}; set"
    assert words in told and told.count("\n") == 1


def test_torchrun_tells_it_once_and_every_rank_ends_with_2(place):
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command = [*torchrun, f"--master-port={free_port()}", "-m", "vapo_megatron.train"]
    done = subprocess.run(
        [*command, "--config", str(place / "config.yaml"), "data.train_path=/a.jsonl"],
        cwd=ROOT, env={**clean, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(told) == 1 and "train_path=/a.jsonl does not exist; set" in told[0], done.stderr
    assert "exitcode  : 2" in done.stderr
