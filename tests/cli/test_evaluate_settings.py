"""Which settings an evaluation on its own uses, and which ranks check the ground truths.

Two real processes that hold one sampler, or one each, which is a stand-in; the verifier is real.
With vLLM it is in tests/e2e/test_evaluate.py.
"""

import json
from unittest import mock

import pytest
import torch.distributed as dist

from tests import jsonl
from tests.rollout.evaluation.test_judging import SAMPLES, Sampler, decode
from tests.weights.tiny_hf import write_tiny_model
from vapo_megatron.cli.evaluate import command
from vapo_megatron.cli.evaluate import summary as summaries
from vapo_megatron.cli.sampling import inputs, samples
from vapo_megatron.rollout.evaluation.statistics import estimates, problem_values
from vapo_megatron.weights.hf_directory import note_export

SEED, NUM_PROBLEMS = 20, 7
"""With which the intervals are others than with seed 0."""
OVERRIDES = [
    "rollout.dtype=float32", "model.dtype=bfloat16",
    "rollout.max_prompt_tokens=16", "rollout.max_response_tokens=24",
    "rollout.stop_token_ids=[7,9]", f"seed={SEED}", f"evaluation.samples={SAMPLES}",
    "evaluation.temperature=0.5", "evaluation.top_p=0.9", "evaluation.top_k=8",
    "reward.num_workers=3", "reward.timeout_seconds=47",
]  # fmt: skip


class OneSampler(Sampler):
    """Of both processes; only a replica's first rank gets responses."""

    def __init__(self, tp_size):
        super().__init__(0, 1, keeps_rollouts=dist.get_rank() % tp_size == 0)


def evaluate(hf, data, out, tp_size, overrides=()):
    """What a rank is told, or the verifiers that it starts; a worker's function."""
    from vapo_megatron.errors import UserError
    from vapo_megatron.reward import built_in

    dist.destroy_process_group()
    config = inputs.evaluation_config(
        hf, [*OVERRIDES, f"rollout.tensor_model_parallel_size={tp_size}", *overrides], 2
    )
    verifiers, verifier = [], built_in.MathVerifier

    def noted(*arguments):
        verifiers.append(arguments)
        return verifier(*arguments)

    with (
        mock.patch.object(samples, "build_engine", lambda *_: OneSampler(tp_size)),
        mock.patch.object(samples, "decode_responses", lambda _, responses: decode(responses)),
        mock.patch.object(built_in, "MathVerifier", noted),
    ):
        try:
            summaries.evaluate_checkpoint(inputs.check(hf, data, config), config, out)
        except UserError as error:
            return str(error)
    return verifiers


def written(tmp_path, answers):
    """(model, data file) with these ground truths."""
    hf = write_tiny_model(tmp_path / "hf", num_layers=1, hidden=128, vocab=64)
    data = tmp_path / "held_out.jsonl"
    rows = [{"prompt": f"w{3 + i} w9", "answer": answer} for i, answer in enumerate(answers)]
    jsonl.write(data, rows)
    return hf, data


def test_settings_reach_the_header_the_statistics_and_the_verifier(workers, tmp_path):
    paths, out = written(tmp_path, list(map(str, range(NUM_PROBLEMS)))), tmp_path / "out.jsonl"
    first, second = workers.run(2, evaluate, *paths, out, 2)
    assert first == [(3, 47.0)] and second == [], "one verifier for each sampler"
    header, *lines = jsonl.read(out)
    expected = {
        "samples": SAMPLES, "temperature": 0.5, "top_p": 0.9, "top_k": 8, "seed": SEED,
        "max_response_tokens": 24, "stop_token_ids": [7, 9], "dtype": "float32",
    }  # fmt: skip
    assert {name: header[name] for name in expected} == expected
    assert len(lines) == header["num_problems"] == NUM_PROBLEMS
    values = [problem_values(line["responses"]) for line in lines]
    summary = json.loads(out.with_suffix(".json").read_text())
    found = summary["statistics"]
    assert "by_verifier" not in summary

    def intervals(seed):
        return {name: vars(estimate) for name, estimate in estimates(values, seed).items()}

    assert found == intervals(SEED) != intervals(0)


HYBRID = [
    "reward.verifier=hybrid", "reward.hybrid=[math, strict]", "reward.num_workers=1",
    "reward.verifiers.strict.use=tests.reward.own_verifiers:Strict",
]  # fmt: skip


def test_each_verifier_has_statistics_of_its_own(workers, tmp_path, monkeypatch, capsys):
    """Sampled and judged, then summed up again by a run that finds everything there."""
    paths, out = (
        written(tmp_path, ["0", "Answer", "2", "no idea", "Answer"]),
        tmp_path / "out.jsonl",
    )
    for _ in range(2):
        workers.run(2, evaluate, *paths, out, 2, HYBRID)
        lines = [json.loads(line) for line in out.read_text().splitlines()[1:]]
        judges = ["math", "strict", "math", "strict", "strict"]
        assert [line["verifier"] for line in lines] == judges
        summary = json.loads(out.with_suffix(".json").read_text())
        assert summary["by_verifier"].keys() == {"math", "strict"}
        for name, found in summary["by_verifier"].items():
            values = [problem_values(r["responses"]) for r in lines if r["verifier"] == name]
            assert found["num_problems"] == len(values) == judges.count(name)
            expected = {n: vars(e) for n, e in estimates(values, SEED).items()}
            assert found["statistics"] == expected
        values = [problem_values(line["responses"]) for line in lines]
        assert "reward_mean" not in summary["statistics"]
        assert summary["statistics"] == {n: vars(e) for n, e in estimates(values, SEED).items()}
        out.with_suffix(".json").unlink()
    # Where scores are rewards, they are one more statistic; math's right answers have the end of
    # the range.
    scored = tmp_path / "scored.jsonl"
    workers.run(2, evaluate, *paths, scored, 2, [*HYBRID, "reward.from_score=[0, 2]"])
    summary = json.loads(scored.with_suffix(".json").read_text())
    of_math = [r for line in lines if line["verifier"] == "math" for r in line["responses"]]
    expected = sum(2 * (r["status"] == "correct") for r in of_math) / len(of_math)
    found = summary["by_verifier"]["math"]["statistics"]["reward_mean"]
    assert found["value"] == pytest.approx(expected) and 0 < expected < 2
    # Strict finds "Answer" in nearly every response, and "no idea" in one of four.
    right = [sum(r["status"] == "correct" for r in line["responses"]) for line in lines]
    assert right[3] < right[1] and 0 < right[0] < SAMPLES

    values = [problem_values(line["responses"]) for line in lines]
    found = summaries.Summary(
        estimates(values, 0),
        {"math": (2, estimates(values[:1], 0)), "x": (3, estimates(values, 0))},
        {},
    )
    monkeypatch.setattr(summaries, "evaluate_checkpoint", lambda *_, **__: found)
    monkeypatch.setenv("COLUMNS", "100")
    note_export(paths[0], 143, [])
    given = ["--checkpoint", str(paths[0]), "--data", str(paths[1]), "--out", str(out), *OVERRIDES]
    assert command.main(given) == 0
    told = capsys.readouterr().out
    assert told.count("avg@4") == 3 and "2 of 5 problems: math" in told and "3 of 5" in told
    assert "(step 143)" in told
    # One problem, of math, has no intervals.
    assert told.count(" - \u2502\n") >= len(values[0])


def test_verdicts_of_another_verifier_are_not_resumed(workers, tmp_path):
    paths, out = written(tmp_path, ["0", "1"]), tmp_path / "out.jsonl"

    def told(*overrides):
        return workers.run(2, evaluate, *paths, out, 2, overrides)

    assert told() == [[(3, 47.0)], []]
    kept = out.read_bytes()
    strict = "reward.verifiers.strict.use=tests.reward.own_verifiers:Strict"
    for others in (
        ["reward.verifier=exact"],
        ["reward.verifier=tests.reward.own_verifiers:Strict"],
        ["reward.verifiers.exact.kind=choice"],
        [strict, "reward.verifier=hybrid", "reward.hybrid=[strict]"],
        ["reward.from_score=[0,1]"],
    ):
        for message in told(*others):
            assert "out.jsonl is of another evaluation: its reward is {'verifier': " in message
    # How long they may take, and in how many processes, changes nothing of a verdict.
    assert told("reward.num_workers=1", "reward.timeout_seconds=9") == [[], []]
    hf, data = paths
    # Of the columns, exact reads `kind`, and math none.
    data.write_text(data.read_text().replace("}\n", ', "kind": "text"}\n'))
    assert told("reward.num_workers=1") == [[], []]
    assert out.read_bytes() == kept


@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_ground_truth_is_checked_on_one_rank(workers, tmp_path, tp_size):
    paths = written(tmp_path, ["1", "2", "3", "??"])
    told = workers.run(2, evaluate, *paths, tmp_path / "out.jsonl", tp_size)
    assert told[0] == told[1] and "row 3 (from 0) has the answer '??'" in told[0]


def test_rows_that_are_refused_can_be_left_out(workers, tmp_path):
    """Then summed up again by a run that finds all the others there."""
    paths, out = written(tmp_path, ["0", "???", "2", True]), tmp_path / "out.jsonl"
    one = ["reward.num_workers=1"]
    told = workers.run(2, evaluate, *paths, out, 2, one)[0]
    assert "line 4: answer=True must" in told and "or set data.skip_unusable=true" in told
    for _ in range(2):
        skipping = [*one, "data.skip_unusable=true"]
        assert workers.run(2, evaluate, *paths, out, 2, skipping)[0] == [(1, 47.0)]
        header, *lines = jsonl.read(out)
        assert [line["prompt_index"] for line in lines] == [0, 2] and header["num_problems"] == 4
        assert json.loads(out.with_suffix(".json").read_text())["left_out"] == 2
