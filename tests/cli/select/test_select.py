"""`vapo select` from its options to its files: resumed, again, by other rules, on two ranks.

Files, tokenizer, verifiers, the reward model and processes are real. The sampler is a stand-in
whose responses are scores by problem and sample. Not exercised: vLLM (tests/e2e/test_evaluate.py
samples with the same functions; tests/docs/test_commands.py runs the command), a reward model on a
GPU.
"""

import json
import os
import types
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist

from tests import jsonl
from tests.distributed.float64 import load_critic
from tests.rollout.tiny_tokenizer import write_tiny_tokenizer
from tests.weights.tiny_hf import write_tiny_hf, write_tiny_reward_model
from tests.whole_run import Engine, answered
from vapo_megatron.cli.select import command
from vapo_megatron.cli.select.table import METADATA_KEY
from vapo_megatron.config import RewardConfig
from vapo_megatron.data.problems import load_problems
from vapo_megatron.data.rollout import PENDING

SAMPLES = 4
SCORES = [
    ("0.1", "0.2", "0.3", "0.4"), ("0.9", "0.4", "0.3", "0.2"), ("0.9", "0.8", "0.7", "0.1"),
    ("0.9", "0.9", "0.9", "0.9"), ("0.6", "0.0", "0.5", "0.0"), ("0.9", "0.9", "0.0", "broken"),
]  # fmt: skip
"""Of each problem's responses: .5 is correct, and what is no number fails."""
WORDS = [
    "w3 w4 w5 w6 w7", "w8 w9 w10 w11 w12", "w13 w14 w15 w16 w17", "w18 w19 w20 w21 w22",
    "w8 w9 w10 w11 w42", "w28 w29 w30 w31 w32",
]  # fmt: skip
"""Problem 4 is nearly problem 1: of 13 pieces each 11 are the same, 11 of 15 in all."""
ROWS = [
    {"prompt": words, "answer": i, "topic": "ab"[i % 2], "tests": [i]}
    for i, words in enumerate(WORDS)
]


class Sampler(Engine):
    """Responses of a replica, whose first token says which they are."""

    def __init__(self, replica, num_replicas, batches):
        super().__init__(replica, num_replicas)
        self._batches = batches

    def asked(self, requests, sampling, *_):
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, -1)
        assert self._batches > 0, "nothing is sampled again"
        self._batches -= 1

    def respond(self, rollout, seed):
        sample = rollout.sample
        ids = [SAMPLES * rollout.prompt.index + sample] * (1 + sample)
        return answered(rollout, ids, logprob=0.0, truncated=sample == 3)


def decode(_, responses):
    return [SCORES[ids[0] // SAMPLES][ids[0] % SAMPLES] for ids in responses]


def run_select(arguments, batches, passes):
    """(exit code, what is printed to people), of one rank; a worker's function.

    batches, passes: how often the sampler and the reward model answer before they fail.
    """
    from vapo_megatron.cli import command as shared
    from vapo_megatron.cli.sampling import samples
    from vapo_megatron.cli.select import reward_scores

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    left, judge = [None] * passes, reward_scores._judge

    def limited(*given):
        assert left, "no more scores"
        left.pop()
        return judge(*given)

    under_torchrun = {"LOCAL_RANK": str(rank)} if size > 1 else {}
    told = []
    with (
        mock.patch.dict(os.environ, under_torchrun),
        mock.patch.object(samples, "build_engine", lambda *_: Sampler(rank, size, batches)),
        mock.patch.object(samples, "decode_responses", decode),
        mock.patch.object(reward_scores, "_judge", limited),
        mock.patch.object(shared, "report", lambda line, *_: told.append(line)),
    ):
        if size == 1:
            os.environ.pop("LOCAL_RANK", None)
        return command.main(arguments), told


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("select")
    write_tiny_hf(place / "hf", num_layers=1, hidden=128, vocab=64)
    for name, seed in (("reward", 0), ("other", 1)):
        sizes = {"num_layers": 2, "hidden": 32, "ffn": 48, "vocab": 64}
        write_tiny_reward_model(place / name, **sizes, seed=seed)
    for name in ("hf", "reward", "other"):
        write_tiny_tokenizer(place / name)
    jsonl.write(place / "all.jsonl", ROWS)
    table = pyarrow.Table.from_pylist([{**row, "pass_rate": 7} for row in ROWS])
    pyarrow.parquet.write_table(table, place / "all.parquet")
    return place


@pytest.fixture
def select(workers, place, tmp_path):
    """select(*options, data=, ranks=, ...) -> (exit code, message); it writes tmp_path/out."""

    def run(*options, data="all.jsonl", ranks=1, batches=99, passes=99):
        arguments = [
            "--checkpoint", str(place / "hf"), "--data", str(place / data),
            "--out", str(tmp_path / "out.parquet"), "--samples", str(SAMPLES), "--batch", "2",
            "reward.verifier=tests.cli.select.graded:Graded", "reward.num_workers=1",
            "rollout.max_prompt_tokens=16", "rollout.max_response_tokens=24",
            "model.dtype=float32", *options,
        ]  # fmt: skip
        results = workers.run(ranks, run_select, arguments, batches, passes)
        code, told = results[0]
        return code, "".join(told)

    run.out = tmp_path / "out.parquet"
    return run


def contents(out):
    """Of every file that a selection writes, its bytes."""
    names = (out.name, "out.html", "out.samples.jsonl")
    return {name: (out.parent / name).read_bytes() for name in names}


def rows(out):
    return pyarrow.parquet.read_table(out).to_pylist()


RULES = ("--pass-rate", "0.25", "0.75", "--drop-duplicates", "0.7")


def test_the_rows_that_are_kept_and_what_was_measured(select):
    assert select(*RULES) == (0, "")
    # Problem 4 is a near-duplicate; of the others 0 and 3 are too hard and too easy.
    assert [row["prompt"] for row in rows(select.out)] == [WORDS[i] for i in (1, 2, 5)]
    first, _, last = rows(select.out)
    assert first == {
        "prompt": WORDS[1], "answer": "1", "topic": "b", "tests": [1], "pass_rate": 0.25,
        "score_mean": pytest.approx(1.8 / 4), "scores": [0.9, 0.4, 0.3, 0.2], "length_mean": 2.5,
        "lengths": [1, 2, 3, 4], "truncated_fraction": 0.25,
    }  # fmt: skip
    assert (last["pass_rate"], last["scores"]) == (0.5, [0.9, 0.9, 0.0, None])
    assert last["score_mean"] == pytest.approx(0.6)
    about = json.loads(pyarrow.parquet.read_schema(select.out).metadata[METADATA_KEY])
    assert (about["read"], about["kept"]) == (6, 3)
    assert about["dropped"] == {"near-duplicates": 1, "pass rate outside [0.25, 0.75]": 2}
    # Training reads it as it is, with the columns for its verifier.
    problems = load_problems(select.out)
    assert [(p.prompt, p.answer, p.metadata["tests"]) for p in problems] == [
        (WORDS[i], str(i), [i]) for i in (1, 2, 5)
    ]  # fmt: skip
    sampled = [json.loads(line) for line in contents(select.out)["out.samples.jsonl"].splitlines()]
    assert [line["prompt_index"] for line in sampled[1:]] == [0, 1, 2, 3, 5]


def test_again_resumed_and_on_two_ranks_it_is_the_same(select):
    assert select(*RULES) == (0, "")
    straight = contents(select.out)
    assert select(*RULES, batches=0) == (0, ""), "nothing is sampled again"
    assert select(*RULES, "--nproc", "2", batches=0) == (0, ""), "nor is torchrun started for it"
    assert contents(select.out) == straight
    for path in select.out.parent.glob("out.*"):
        path.unlink()
    assert select(*RULES, batches=1)[0] == 1
    assert not select.out.exists()
    part = (select.out.parent / "out.samples.jsonl.part0000").read_text()
    assert len(part.splitlines()) == 3, "a header, and the problems of one batch"
    # Two problems are done, and two ranks sample three more in two batches.
    assert select(*RULES, ranks=2, batches=2) == (0, "")
    assert contents(select.out) == straight


def test_other_rules_need_no_other_samples(select):
    assert select() == (0, "")
    samples = contents(select.out)["out.samples.jsonl"]
    assert [row["prompt"] for row in rows(select.out)] == WORDS, "no rule keeps all"
    for options, kept in (
        (("--pass-rate", "1", "1"), [3]),
        # Means .25, .45, .625, .9, .275, .6.
        (("--hardest", "2"), [0, 4]),
        (("--hardest", "1", "--pass-rate", "0.5", "1"), [4]),
        (("--hardest", "0.5"), [0, 1, 4]),
        # In topic a .25, .625, .275, in b .45, .9, .6: of b the first is lowest in its units.
        (("--hardest", "3", "--within", "topic"), [0, 1, 4]),
        (("--drop-duplicates", "1"), [0, 1, 2, 3, 4, 5]),
        (("--drop-duplicates",), [0, 1, 2, 3, 4, 5]),
        (("--drop-duplicates", "0.7"), [0, 1, 2, 3, 5]),
    ):
        assert select(*options, batches=0) == (0, "")
        assert [row["prompt"] for row in rows(select.out)] == [WORDS[i] for i in kept], options
    assert contents(select.out)["out.samples.jsonl"] == samples
    code, told = select("--pass-rate", "0.8", "0.9", batches=0)
    assert code == 2 and told.startswith(
        "select: nothing is kept of 6 prompts: 6 pass rate outside [0.8, 0.9]; give wider rules"
    )
    assert len(rows(select.out)) == 5, "what there was is left"


def test_the_best_response_is_a_column(select):
    """Problem 5 has two of .9, and one that failed."""
    assert select("--best-of", "reference") == (0, "")
    found = [row["reference"] for row in rows(select.out)]
    assert found == ["0.4", "0.9", "0.9", "0.9", "0.6", "0.9"]
    about = json.loads(pyarrow.parquet.read_schema(select.out).metadata[METADATA_KEY])
    assert about["best_of"] == "reference"
    # A column of that name is replaced, and needs no new samples.
    assert select("--best-of", "topic", "--hardest", "1", batches=0) == (0, "")
    assert [(row["prompt"], row["topic"]) for row in rows(select.out)] == [(WORDS[0], "0.4")]
    assert "reference" not in rows(select.out)[0]


def test_a_prompt_without_a_score_has_no_best_response(select, place):
    exact = ("reward.verifier=exact", "--best-of", "reference")
    code, told = select(*exact, "--drop-duplicates", "0.7")
    assert code == 2 and told == (
        f"select: row 0 (from 0) of {place}/all.jsonl: no response has a score, so none is the "
        "best of --best-of=reference; judge by what gives scores, such as "
        "reward.verifier=reward_model, or leave the prompt out"
    )
    assert not select.out.exists()


def test_a_parquet_file_keeps_its_types_and_its_columns(select):
    assert select(*RULES, data="all.parquet") == (0, "")
    table = pyarrow.parquet.read_table(select.out)
    assert table.column("answer").to_pylist() == [1, 2, 5]
    assert table.column("pass_rate").to_pylist() == [0.25, 0.75, 0.5], "it replaces the file's"
    assert table.column_names[:4] == ["prompt", "answer", "topic", "tests"]
    assert len(table.column_names) == len(set(table.column_names)) == 10


def test_a_column_that_parquet_cannot_hold_is_found_before_sampling(select, place):
    def written(levels):
        found = [{**row, "level": level} for row, level in zip(ROWS, levels)]
        jsonl.write(place / "levels.jsonl", found)

    given = {"data": "levels.jsonl"}
    written([0, 1, 2, 3, "hard", 5])
    code, told = select("reward.verifier=exact", **given, batches=0)
    assert code == 2 and "levels.jsonl: column 'level' is int64 in line 1 and string in " in told
    assert not list(select.out.parent.glob("out.*"))
    written(range(6))
    assert select("reward.verifier=exact", **given) == (0, "")
    samples = contents(select.out)["out.samples.jsonl"]
    # A repair of a column that no judging reads, of all rows, leaves the samples.
    written(map(str, range(6)))
    assert select("reward.verifier=exact", **given, batches=0) == (0, "")
    assert contents(select.out)["out.samples.jsonl"] == samples
    assert [row["level"] for row in rows(select.out)] == list("012345")


def test_the_page_needs_no_script_and_names_what_was_dropped(select):
    select(*RULES)
    page = contents(select.out)["out.html"].decode()
    assert "default-src 'none'" in page and "http" not in page.replace("http-equiv", "")
    assert "<script></script>" in page
    for words in (
        '<th scope="row">dropped: near-duplicates</th><td>1</td>',
        '<div class="value">6 <i>&rarr;</i> 3</div>',
        # Rates of problems 0, 1, 2, 3, 5; five bars for four samples.
        "<title>kept: 1 (0.2 to 0.4)</title>",
        "<title>left out: 1 (0 to 0.2)</title>",
        "<title>left out: 1 (0.8 to 1)</title>",
        f"row 4 repeats row 1 (from 0)</div><pre>{WORDS[4]}</pre><pre>{WORDS[1]}</pre>",
        "1 verdicts failed or timed out and give no score.",
    ):
        assert words in page, words


def test_what_does_not_fit_is_one_line(select, place):
    assert select() == (0, "")
    for options, message in (
        (["--samples", "3"], "out.samples.jsonl is of another evaluation: its samples is 4, here"),
        (["reward.verifier=exact"], "is of another evaluation: its reward is {'verifier': 'tests."),
        (["reward.from_score=[0,1]"], "is of another evaluation: its reward is {'verifier'"),
        (["--within", "colour", "--hardest", "1"], "--within=colour is no column of "),
        (["--hardest", "0"], "--hardest=0 must be at least 1"),
        (["--hardest", "1.5"], "--hardest=1.5 must be a share in (0, 1], or a whole number"),
        (["--hardest", "few"], "argument --hardest: invalid number value: 'few'; --help lists"),
        (["--best-of", "prompt"], "--best-of=prompt must be the name of another column than the"),
        (["--best-of", "scores"], "--best-of=scores must be the name of another column"),
        (["--batch", "0"], "--batch=0 must be at least 1"),
        (["--data", str(select.out)], "out.parquet is --data, too, whose rows it would replace"),
        (["--out", f"{place}/all.jsonl"], "all.jsonl must end in .parquet; change it"),
        (["--out", f"{place}/all.parquet"], "all.parquet exists and is no selection; give another"),
    ):
        code, told = select(*options)
        assert code == 2 and told.startswith("select: ") and message in told, (options, told)


def test_a_verifier_that_does_not_work_stops_it_and_its_verdicts_are_not_kept(select):
    code, told = select("reward.max_failed_fraction=0.1")
    # The last batch, of problems 4 and 5, has one of eight.
    assert code == 2 and "1 verdicts failed and 0 timed out, of 8: more than" in told
    assert select("reward.max_failed_fraction=0.2", batches=1) == (0, "")


def test_rows_are_judged_by_whom_hybrid_chooses(select):
    hybrid = (
        "reward.verifier=hybrid", "reward.hybrid=[graded]",
        "reward.verifiers.graded.use=tests.cli.select.graded:Graded",
    )  # fmt: skip
    assert select(*hybrid) == (0, "")
    _, *lines = map(json.loads, contents(select.out)["out.samples.jsonl"].splitlines())
    assert {line["verifier"] for line in lines} == {"graded"}
    assert [row["pass_rate"] for row in rows(select.out)] == [0, 0.25, 0.75, 1, 0.5, 0.5]
    assert select(*hybrid, "--hardest", "2", batches=0) == (0, "")
    assert [row["prompt"] for row in rows(select.out)] == [WORDS[i] for i in (0, 4)]


def test_the_reward_model_scores_once_all_is_sampled(select, place):
    """Against transformers in float64; in one pass, interrupted, and on two ranks."""
    options = (
        "reward.verifier=reward_model", f"model.reward_hf_path={place}/reward", "--hardest", "3",
        # Each pass writes one prompt.
        "parallel.max_tokens_per_microbatch=4",
    )  # fmt: skip
    assert select(*options) == (0, "")
    whole = contents(select.out)
    assert b"pending" not in whole["out.samples.jsonl"]
    model, expected = load_critic(str(place / "reward")), []
    for index, words in enumerate(WORDS):
        prompt = [int(word[1:]) for word in words.split()]
        for sample in range(SAMPLES):
            ids = torch.tensor([[*prompt, *[SAMPLES * index + sample] * (1 + sample)]])
            with torch.no_grad():
                state = model.model(ids, use_cache=False).last_hidden_state[0, -1]
                expected.append(float(model.lm_head(state)))
    _, *lines = map(json.loads, whole["out.samples.jsonl"].splitlines())
    found = [response for line in lines for response in line["responses"]]
    assert [r["score"] for r in found] == pytest.approx(expected, abs=5e-6)
    assert [r["status"] == "correct" for r in found] == [score >= 0 for score in expected]
    assert all("token_ids" not in r and r["text"] for r in found)
    means = [sum(expected[i : i + SAMPLES]) / SAMPLES for i in range(0, len(expected), SAMPLES)]
    hardest = sorted(sorted(range(6), key=means.__getitem__)[:3])
    assert [row["prompt"] for row in rows(select.out)] == [WORDS[i] for i in hardest]

    assert select(*options, "--best-of", "best", batches=0, passes=0) == (0, "")
    by_problem = [expected[i : i + SAMPLES] for i in range(0, len(expected), SAMPLES)]
    best = [SCORES[i][max(range(SAMPLES), key=by_problem[i].__getitem__)] for i in hardest]
    assert [row["best"] for row in rows(select.out)] == best != [SCORES[i][0] for i in hardest]
    assert select(*options, batches=0, passes=0) == (0, ""), "nothing is scored again"
    assert contents(select.out) == whole
    code, told = select(*options, f"model.reward_hf_path={place}/other")
    assert code == 2 and "is of another evaluation: its reward_weights is " in told
    for path in select.out.parent.glob("out.*"):
        path.unlink()
    assert select(*options, passes=2)[0] == 1
    assert select(*options, batches=0, ranks=2, passes=2) == (0, ""), "two prompts on each"
    assert [row["prompt"] for row in rows(select.out)] == [WORDS[i] for i in hardest]
    again = [json.loads(line) for line in contents(select.out)["out.samples.jsonl"].splitlines()]
    scores = [r["score"] for line in again[1:] for r in line["responses"]]
    assert scores == pytest.approx(expected, abs=5e-6)


def test_the_reward_model_reads_all_that_an_episode_has_seen():
    from vapo_megatron.cli.select import reward_scores

    asked = []

    def score(sequences):
        asked.extend(sequences)
        return [0.5] * len(sequences)

    responses = [
        {"status": PENDING, "sequence": [1, 90, 5, 91, 7]}, {"status": PENDING, "token_ids": [6]},
        {"status": "correct", "score": None},
    ]  # fmt: skip
    line = {"prompt_index": 0, "verifier": "reward_model", "responses": responses}
    dataset = types.SimpleNamespace(tokens=lambda index: [1])
    evaluation = types.SimpleNamespace(dataset=dataset)
    reward_scores._judge([line], evaluation, RewardConfig(), score)
    assert asked == [[1, 90, 5, 91, 7], [1, 6]]
    assert responses[:2] == [{"status": "correct", "score": 0.5}] * 2


def test_a_reward_model_that_does_not_fit_is_refused(select, place):
    for options, message in (
        (["model.reward_hf_path=/nowhere"], "model.reward_hf_path=/nowhere does not exist; set"),
        ([f"model.reward_hf_path={place}/hf"], f"model.reward_hf_path={place}/hf: "),
        ([f"model.reward_hf_path={place}/reward"], "would score nothing: all rows of"),
        (["reward.verifier=reward_model"], "needs model.reward_hf_path, found null"),
    ):
        code, told = select(*options)
        assert code == 2 and message in told and told.count("\n") == 0, (options, told)
