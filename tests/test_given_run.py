"""Supervised fine-tuning: whole runs on the responses of a data file, without vLLM and verifier.

Two data-parallel ranks. Every update is given the tokens of the rows whose turn it is, the losses
are those of transformers in float64, and a run that was stopped, or replayed, ends with the same
weights. That the loss is the same in every layout is in tests/distributed, how a file is read in
tests/rollout/test_given.py.
"""

import contextlib
import json
import math
import re
import sys

import pytest
import torch

from tests import jsonl
from tests.dumped import MODEL, NUM_RESPONSES, dump
from tests.models.float64 import load_float64
from tests.weights.tiny_hf import EOS, write_tiny_model
from tests.whole_run import ENGINE, measured, settings, trainer
from vapo_megatron.cli.train import main
from vapo_megatron.errors import DataError

ROWS, HELD_OUT, PER_STEP, STEPS, STOP = 7, 3, 4, 3, 2
TEMPERATURE = 0.8


def row(i):
    """Its prompt's and its response's ids, which begin alike and have different lengths."""
    return [3 + i, 5], [20, 21, *range(30 + i, 31 + i + i % 3), EOS]


def written(i):
    """As the file has it: a text without the stop token, or ids."""
    prompt, response = row(i)
    as_text = " ".join(f"w{t}" for t in response[:-1])
    return {
        "prompt": " ".join(f"w{t}" for t in prompt), "response": response if i % 2 else as_text
    }  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """(model, directory of the data)."""
    tmp = tmp_path_factory.mktemp("given")
    for name, some in {"train": range(ROWS), "test": range(ROWS, ROWS + HELD_OUT)}.items():
        (tmp / f"{name}.jsonl").write_text("".join(json.dumps(written(i)) + "\n" for i in some))
    return write_tiny_model(tmp / "hf", **MODEL), tmp


def settings_of(hf, tmp, name, world_size=2):
    return settings(
        hf,
        tmp / name,
        algorithm={
            "policy_loss": "none", "advantage_estimator": "none", "positive_lm_coef": 0.5,
            "group_size": 1, "responses_per_step": PER_STEP, "mini_batch_size": PER_STEP,
            "policy_steps": STEPS,
        },
        rollout={"temperature": TEMPERATURE},
        data={
            "train_path": str(tmp / "train.jsonl"), "shuffle": False, "answer_column": None,
            "response_column": "response",
        },
        evaluation={"path": str(tmp / "test.jsonl"), "every_steps": 1},
        parallel={"world_size": world_size, "max_tokens_per_microbatch": 16},
        optimizer={"actor_learning_rate": 1e-2, "actor_warmup_updates": 0},
        checkpoint={"hf_export": False},
        logging={"rollout_groups": 9, "dump_steps": 9},
    )  # fmt: skip


@contextlib.contextmanager
def without(*modules):
    """Let the body fail where it would import one of these."""
    held = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(dict.fromkeys(modules))
    try:
        yield
    finally:
        for name, module in held.items():
            del sys.modules[name]
            sys.modules |= {} if module is None else {name: module}


def fit(hf, tmp, name, stop_after=None, replay=None):
    """(of each update what each microbatch of this rank has, weights); a worker's function.

    stop_after: SIGTERM arrives after this many steps.
    """
    with without("vllm", ENGINE), trainer(settings_of(hf, tmp, name), replay) as run:
        seen, update, step = [], run.actor.update, run.train_step

        def watched(mini_batches):
            parts = [m.batch for mini_batch in mini_batches for m in mini_batch.microbatches]
            seen.append({p: t for part in parts for p, t in tokens_of(part)})
            return update(mini_batches)

        def stopping(number):
            metrics = step(number)
            if number + 1 == stop_after:
                run.early_stop.poll = lambda: "SIGTERM"
            return metrics

        run.actor.update, run.train_step = watched, stopping
        run.fit()
        (model,) = run.actor.placed.model
        return seen, {name: p.detach().clone() for name, p in model.named_parameters()}


def tokens_of(batch):
    """(position, all tokens, response tokens) of each response of a batch."""
    ends = batch.cu_seqlens.tolist()
    sequences = batch.tokens.split(batch.sequence_lengths.tolist())
    for i, (position, sequence) in enumerate(zip(batch.positions.tolist(), sequences)):
        assert batch.is_positive[ends[i] : ends[i + 1]].all()
        places = batch.places[ends[i] : ends[i + 1]].long()
        yield position, (sequence.tolist(), sequence[places].tolist())


@pytest.fixture(scope="module")
def straight(workers, inputs):
    """Of both ranks."""
    return workers.run(2, fit, *inputs, "straight")


def nll(hf, some):
    """Mean over all tokens of some rows, by transformers in float64."""
    model, total, count = load_float64(str(hf)), 0.0, 0
    for i in some:
        prompt, response = row(i)
        logits = model(torch.tensor([prompt + response])).logits[0] / TEMPERATURE
        logp = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        total -= logp.gather(1, torch.tensor(response)[:, None]).sum().item()
        count += len(response)
    return total / count, count


def test_each_update_has_the_rows_whose_turn_it_is(straight):
    """In the file's order, over its end."""
    for step in range(STEPS):
        found = {}
        for seen, _ in straight:
            assert not found.keys() & seen[step].keys(), "a response is trained on by one rank"
            found |= seen[step]
        turn = [(step * PER_STEP + i) % ROWS for i in range(PER_STEP)]
        rows = [row(i) for i in turn]
        assert found == {p: (prompt + answer, answer) for p, (prompt, answer) in enumerate(rows)}


def test_losses_are_those_of_transformers_in_float64(straight, inputs):
    hf, tmp = inputs
    rows = jsonl.read(tmp / "straight/metrics.jsonl")
    expected, _ = nll(hf, range(PER_STEP))
    assert rows[1]["actor/positive_lm_loss"] == pytest.approx(expected, rel=2e-6)
    assert rows[1]["actor/loss"] == pytest.approx(0.5 * expected, rel=2e-6)
    expected, tokens = nll(hf, range(ROWS, ROWS + HELD_OUT))
    assert rows[0]["evaluation/nll_mean"] == pytest.approx(expected, rel=2e-6)
    assert [r["evaluation/nll_tokens"] for r in rows] == [tokens] * (STEPS + 1)


def test_the_held_out_loss_falls(straight, inputs):
    losses = [r["evaluation/nll_mean"] for r in jsonl.read(inputs[1] / "straight/metrics.jsonl")]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0], losses


def test_there_are_no_metrics_of_what_was_neither_sampled_nor_judged(straight, inputs):
    run_dir = inputs[1] / "straight"
    names = {
        "step", "actor/loss", "actor/positive_lm_loss", "actor/grad_norm", "actor/skipped_updates",
        "actor/learning_rate", "rollout/response_length_mean", "rollout/response_length_max",
        "rollout/truncated_fraction", "evaluation/nll_mean", "evaluation/nll_tokens",
    }  # fmt: skip
    assert [set(row) for row in measured(run_dir)[1:]] == [names] * STEPS
    timed = {n for n in jsonl.read(run_dir / "metrics.jsonl")[-1] if n.startswith("time/")}
    phases = ("exchange", "dump", "advantages", "actor_update", "evaluation", "step")
    assert timed - {"time/checkpoint_seconds"} == {f"time/{name}_seconds" for name in phases}
    assert not (run_dir / "problems.jsonl").exists()


def test_what_is_kept_for_people(straight, inputs):
    run_dir = inputs[1] / "straight"
    groups = jsonl.read(run_dir / "rollouts/step_000001.jsonl")
    assert [g["prompt"] for g in groups] == ["w3 w5", "w4 w5", "w5 w5", "w6 w5"]
    (response,) = groups[1]["responses"]
    assert response["text"] == "w20w21w31w32" and response["num_tokens"] == 5
    assert response["tokens"] == {"pieces": ["w20", "w21", "w31", "w32", "</s>"]}
    report = (run_dir / "report.html").read_text()
    assert "SFT" in report and "Held-out NLL" in report


def equal(first, second):
    """Whether two runs' weights are the same bits on each rank."""
    return all(
        one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
        for (_, one), (_, other) in zip(first, second, strict=True)
    )


def test_a_stopped_run_ends_with_the_same_weights(straight, workers, inputs):
    hf, tmp = inputs
    stopped = workers.run(2, fit, *inputs, "stopped", STOP)
    assert len(stopped[0][0]) == STOP and not equal(stopped, straight)
    state = json.loads((tmp / f"stopped/checkpoints/step_{STOP:06d}/state.json").read_text())
    assert state["run"]["data"]["position"] == STOP * PER_STEP - ROWS
    resumed = workers.run(2, fit, *inputs, "stopped")
    assert len(resumed[0][0]) == STEPS - STOP and equal(resumed, straight)
    assert measured(tmp / "stopped") == measured(tmp / "straight")


def test_a_dump_is_replayed_to_the_same_weights(straight, workers, inputs):
    replayed = workers.run(2, fit, *inputs, "replayed", None, inputs[1] / "straight")
    assert equal(replayed, straight)


def test_a_dry_run_counts_the_responses_and_plans_the_updates(inputs, capsys):
    hf, tmp = inputs
    (tmp / "run.yaml").write_text(settings_of(hf, tmp, "dry", world_size=1).to_yaml())
    with without("vllm", ENGINE):
        assert main(["--config", str(tmp / "run.yaml"), "--dry-run"]) == 0
    told = capsys.readouterr().out
    for name, some in {"train": range(ROWS), "test": range(ROWS, ROWS + HELD_OUT)}.items():
        lengths = [len(row(i)[1]) for i in some]
        given = f"{len(some)} rows: responses given, {sum(lengths)} tokens, the longest"
        assert f"# {tmp / name}.jsonl, {given} {max(lengths)}\n" in told
    assert "actor_update" in told and "judged by" not in told
    assert not re.search(r"^# +(generation|logprobs|sync|vLLM: KV cache of) ", told, re.M)


def refusal(hf, tmp, dumped):
    """What a run that needs log-probabilities says to a dump of given responses."""
    sections = {
        "algorithm": {
            "responses_per_step": PER_STEP, "group_size": 1, "mini_batch_size": PER_STEP
        },
    }  # fmt: skip
    with trainer(settings(hf, tmp / "refused", **sections), dumped) as run:
        with pytest.raises(DataError) as error:
            run.prepare(0)
        return str(error.value)


def test_a_dump_without_logprobs_is_refused_where_they_are_needed(straight, workers, inputs):
    (said,) = workers.run(1, refusal, *inputs, inputs[1] / "straight")
    assert "straight/replay/step_000001/rank_00000.safetensors has responses that its run's" in said
    assert "set data.response_column and algorithm.policy_loss=none" in said and "\n" not in said


def fine_tuned(hf, tmp, dumped):
    """On sampled responses the correct ones alone; a worker's function."""
    sections = {
        "algorithm": {
            "policy_loss": "none", "advantage_estimator": "none", "policy_steps": 1,
            "positive_lm_coef": 1.0, "mini_batch_size": NUM_RESPONSES,
        },
    }  # fmt: skip
    with trainer(settings(hf, tmp / "correct", **sections), dumped) as run:
        run.fit()


def test_on_sampled_responses_the_correct_ones_are_trained_on(workers, inputs, tmp_path):
    workers.run(1, dump, tmp_path / "replay", [1], 1)
    workers.run(1, fine_tuned, inputs[0], tmp_path, tmp_path)
    row = measured(tmp_path / "correct")[-1]
    assert row["actor/loss"] == pytest.approx(row["actor/positive_lm_loss"])
    assert {"actor/entropy", "rollout/logprob_diff_mean", "reward/mean"} <= set(row)
    gone = ("actor/policy", "actor/approx", "actor/clip", "actor/first", "algorithm/", "critic/")
    assert not [name for name in row if name.startswith(gone)]
