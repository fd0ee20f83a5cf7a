"""`vapo trajectories` with vLLM: episodes in a file, and right responses that become shorter.

A tiny random model whose tokens are boxed digits, blank lines and the keyword "Wait". Not
exercised: a GPU.
"""

import itertools
import math
import re
import sys
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers

from tests import jsonl
from tests.e2e.test_evaluate import killed, read
from tests.e2e.test_run import ended, run
from tests.rollout.tiny_tokenizer import SPECIAL, write_words
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.cli.evaluate import command as evaluate
from vapo_megatron.cli.trajectories import command as trajectories
from vapo_megatron.data.trajectories import check_ends, read_trajectories, states_of
from vapo_megatron.rollout.revision import find_steps, is_switch, split_steps
from vapo_megatron.rollout.tokenizer import load_tokenizer

ENVIRONMENT = f"{Path(__file__).with_name('trajectory_environment.py')}:Digits"
SETTINGS = [
    "rollout.max_prompt_tokens=16", "rollout.max_response_tokens=48", "model.dtype=float32",
    "rollout.kv_cache_bytes=16777216", "rollout.max_num_sequences=16", "reward.num_workers=1",
]  # fmt: skip
NUM_PROBLEMS, SAMPLES, ENDINGS = 6, 16, 3
KEYWORDS = ("Wait", "Hm mm")


WORDS = [
    *SPECIAL, "\n\n", "\n\n\n", "\n\n\n\n", "\n \n", "Wait", "Wait,", "Wait!",
    "Wait ", "Hm", " mm", " w", "\\boxed{0}", "\\boxed{1}", "\\boxed{2}",
]  # fmt: skip
"""The stop token's id is 2."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "model"
    write_tiny_hf(path, num_layers=2, heads=2, kv_heads=2, vocab=len(WORDS))
    longest_first = "|".join(map(re.escape, sorted(WORDS[3:], key=len, reverse=True)))
    return write_words(path, WORDS, pre_tokenizers.Split(Regex(longest_first), "isolated"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "some.jsonl"
    rows = [
        {"prompt": " w" * (i + 1), "answer": str(i % 3), "kind": f"kind {i}"}
        for i in range(NUM_PROBLEMS)
    ]
    jsonl.write(path, rows)
    return path


EPISODES = [
    "--samples", "3", f"environment.use={ENVIRONMENT}", "environment.max_action_tokens=8",
    "reward.verifier=environment",
]  # fmt: skip
REVISE = ["--endings", str(ENDINGS), "--keywords", ",".join(KEYWORDS)]


def all_of_it(out, checkpoint, data):
    """Episodes; samples; their revision, twice."""
    out = Path(out)
    given = ["--checkpoint", checkpoint, "--data", data, *SETTINGS]
    codes = [
        trajectories.main([*given, *EPISODES, "--out", str(out / "episodes.jsonl")]),
        evaluate.main(
            [*given, "--samples", str(SAMPLES), "--top-p", "1", "--token-ids",
             "--out", str(out / "samples.jsonl")]
        ),
    ]  # fmt: skip
    revise = ["--revise", str(out / "samples.jsonl"), *REVISE]
    for name, batch in (("revised", "4"), ("again", "1")):
        codes.append(
            trajectories.main([*given, *revise, "--out", f"{out}/{name}.jsonl", "--batch", batch])
        )
    print(codes)
    return 0


@pytest.fixture(scope="module")
def found(launch, checkpoint, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    done = ended(launch(all_of_it, str(out), str(checkpoint), str(data)))
    assert "[0, 0, 0, 0]" in done.stdout, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return out, done.stdout


def test_episodes_are_trajectories_whose_states_are_what_the_policy_saw(found, checkpoint, data):
    out, printed = found
    header, read_back = read_trajectories(out / "episodes.jsonl")
    assert header.ends == ("</s>",) and header.line["environment"]["use"] == ENVIRONMENT
    _, lines = read(out / "episodes.samples.jsonl")
    by_key = {(t.question_id, t.sample): t for t in read_back}
    assert f"{len(read_back)} trajectories" in printed and len(read_back) == NUM_PROBLEMS * 3
    for line, response in ((each, r) for each in lines for r in each["responses"]):
        found_one = by_key[line["prompt_index"], response["sample"]]
        turns = response["turns"]
        assert [s.action for s in found_one.steps] == [turn["action"] for turn in turns]
        assert found_one.outcome == (response["status"] == "correct")
        assert found_one.columns["kind"] == f"kind {line['prompt_index']}"
        seen = response["begin"]
        for state, turn in zip(states_of(found_one), turns, strict=True):
            assert state.prompt == seen and state.action == turn["action"]
            seen += turn["action"] + turn["observation"]
    assert {len(t.steps) for t in read_back} >= {1, 2, 3}
    assert {t.outcome for t in read_back} == {True, False}
    # Actions that the limit has cut end their episode, so every other one has its stop token.
    check_ends(header, read_back)


def test_revised_responses_are_right_and_go_on_from_prefixes(found, checkpoint):
    out, printed = found
    tokenizer = load_tokenizer(checkpoint)
    _, before = read(out / "samples.jsonl")
    _, after = read(out / "revised.samples.jsonl")
    changed = 0
    for old_line, new_line in zip(before, after, strict=True):
        for old, new in zip(old_line["responses"], new_line["responses"], strict=True):
            is_right = old["status"] == "correct" and not old["truncated"]
            assert ("left_out" not in new) == is_right
            accepted = [d for d in new["decisions"] if d["accepted"]]
            assert (old["token_ids"] == new["token_ids"]) == (not accepted)
            if not accepted:
                continue
            changed += 1
            # The math verifier reads the last box.
            assert new["text"].rpartition("\\boxed{")[2][0] == old_line["answer"]
            assert new["text"] == tokenizer.decode(new["token_ids"], skip_special_tokens=True)
            assert new["token_ids"][-1] == 2 and len(new["token_ids"]) <= 48
            common = list(
                itertools.takewhile(lambda p: p[0] == p[1], zip(old["token_ids"], new["token_ids"]))
            )
            first = accepted[0]["switch_at_step"]
            begin, end = find_steps(old["text"])[first]
            kept = tokenizer.decode([a for a, _ in common], skip_special_tokens=True)
            assert begin > 0 and kept.startswith(old["text"][:begin]), "of the same tokens"
            assert is_switch(old["text"][begin:end], KEYWORDS)
            ending = split_steps(new["text"])[first:]
            assert not ending or not is_switch(ending[0], KEYWORDS), "the ban"
            assert all(d["best"] > d["value_of_existing"] for d in accepted)
            assert all(math.isclose(d["best"], 0.9 ** round(math.log(d["best"], 0.9)))
                       for d in accepted)  # fmt: skip
    assert changed >= 2 and f"{changed} revised" in printed


def test_what_is_written_is_data_with_responses(found, data):
    out, _ = found
    rows = jsonl.read(out / "revised.jsonl")
    source = jsonl.read(data)
    _, after = read(out / "revised.samples.jsonl")
    kept = [
        (source[line["prompt_index"]], r)
        for line in after for r in line["responses"] if "left_out" not in r
    ]  # fmt: skip
    assert len(rows) == len(kept) > 5
    for row, (of_source, response) in zip(rows, kept, strict=True):
        assert {name: row[name] for name in of_source} == of_source
        assert row["response"] == response["token_ids"] and row["sample"] == response["sample"]


def test_endings_do_not_depend_on_what_is_revised_together(found):
    out, _ = found
    assert (out / "revised.jsonl").read_bytes() == (out / "again.jsonl").read_bytes()
    assert read(out / "revised.samples.jsonl")[1] == read(out / "again.samples.jsonl")[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["episodes", "revised"])
def test_two_replicas_killed_and_started_again_write_the_same(
    found, checkpoint, data, tmp_path, name
):
    out, whole = tmp_path / f"{name}.jsonl", found[0]
    given = EPISODES if name == "episodes" else ["--revise", whole / "samples.jsonl", *REVISE]
    # A problem at a time, so that something is left.
    one_by_one = ["--batch", "1", "rollout.max_num_sequences=1"]
    command = [
        sys.executable, "-m", "vapo_megatron", "trajectories", "--nproc", "2",
        "--checkpoint", checkpoint, "--data", data, "--out", out, *SETTINGS, *given, *one_by_one,
    ]  # fmt: skip
    before = killed(list(map(str, command)), out.with_suffix(".samples.jsonl"))
    assert not out.exists(), "killed before the end"
    done = run(command)
    if name == "episodes":
        left = (NUM_PROBLEMS - before) * 3
        assert f"responses {left} / {left}" in done.stderr, "only what was missing"
    first, expected = (path.read_text().splitlines() for path in (out, whole / out.name))
    assert first[1:] == expected[1:] and len(first) > 3
