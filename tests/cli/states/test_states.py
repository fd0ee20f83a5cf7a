"""`vapo states` from its options to its files: judged, resumed, filtered, read as training reads.

The judge is a server of our own that answers by rules. Not exercised: a language model as judge, a
run that trains on the states.
"""

import json
from pathlib import Path

import pytest

from tests import jsonl
from tests.data.test_trajectories import HEADER, LINE, VECTORS
from tests.reward.test_judge import Server
from tests.rollout.chat_tokenizer import CHATML, SIZE, write_chat_tokenizer
from tests.weights.tiny_hf import write_tiny_hf, write_tiny_model
from vapo_megatron.cli.main import main
from vapo_megatron.cli.states import judging
from vapo_megatron.config import DataConfig
from vapo_megatron.data.problems import load_problems
from vapo_megatron.rollout.evaluation.samples_file import weights_digest
from vapo_megatron.rollout.inputs import read_prompts
from vapo_megatron.rollout.tokenizer import load_tokenizer

GOLD = "the-gold-answer"


def trajectory(sample, *actions, prompt="Which?", **fields):
    """A line whose observations name the actions before them."""
    steps = [{"action": action, "observation": f"seen {action}"} for action in actions[:-1]]
    line = {"question_id": 7, "sample": sample, "prompt": prompt, "answer": GOLD, "outcome": True}
    return {**line, "steps": [*steps, {"action": actions[-1]}], **fields}


LINES = [
    trajectory(0, "look", "A"),
    trajectory(1, "look", "guess", "B", outcome=False),
    trajectory(2, "look", "A", topic=3),
    trajectory(3, "guess", "A", outcome=None, truncated=True),
]


@pytest.fixture
def states(tmp_path, capsys):
    """states(lines, *options, filter=, header's fields) -> (exit code, output, error)."""

    def run(lines, *options, filter="process", **header):
        path = tmp_path / "t.jsonl"
        rows = [{**HEADER, **header}, *lines]
        jsonl.write(path, rows)
        arguments = [path, "--filter", filter, "--out", tmp_path / "s.jsonl", "--overwrite"]
        code = main(["states", *map(str, arguments), "reward.num_workers=1", *options])
        return code, *capsys.readouterr()

    run.out = tmp_path / "s.jsonl"
    run.judged = tmp_path / "t.judged.jsonl"
    return run


def judged_by(server, *options):
    """The overrides of a judge that sees state and action."""
    own = {"base_url": server.url, "model": "m", "template": "{prompt}@@{response}"}
    judge = [f"reward.verifiers.judge.{name}={value}" for name, value in own.items()]
    return ["reward.verifier=judge", *judge, "reward.verifiers.judge.outage_seconds=0", *options]


def no_guess(prompt):
    return "NO" if prompt.endswith("@@guess") else "YES"


def refused(result, *said):
    code, out, error = result
    line = error.splitlines()[-1]
    assert code == 2 and not out and "Traceback" not in error, error
    for text in said:
        assert text in line, line


def test_steps_are_judged_and_the_states_written_once(states):
    with Server(no_guess) as server:
        code, out, error = states(LINES, *judged_by(server))
        asked = [body["messages"][0]["content"] for body in server.asked]
        again = states(LINES, *judged_by(server), filter="none")
        assert states(LINES, *judged_by(server), filter="both")[0] == 0
        assert len(server.asked) == len(asked), "verdicts are kept"
    assert (code, again[0]) == (0, 0), error + again[2]
    # Steps 1 and 2 of the samples 0 and 1 share a state; the topic makes sample 2 another row.
    assert len(asked) == len(set(asked)) + 2 == 8
    assert not any(GOLD in text for text in asked), "the judge is shown no ground truth"
    assert "[user]\nWhich?\n\n[assistant]\nlook\n\n[user]\nseen look@@A" in asked
    assert [row["process"] for row in jsonl.read(states.judged)[1:]].count(0) == 2
    lines = [line.split() for line in out.splitlines()]
    assert ["none", "4", "9", "6"] in lines and ["process", "2", "4", "4"] in lines
    assert ["outcome", "2", "4", "4"] in lines and ["both", "2", "4", "4"] in lines
    assert ["1", "4", "0.750"] in lines and ["2", "4", "0.750"] in lines
    assert "4 states written, filter process" in out


def test_equal_states_have_a_count_and_the_columns_of_their_rows(states):
    lines = [{**line, "verifier": "math"} for line in LINES]
    assert states(lines, filter="none")[0] == 0
    found = jsonl.read(states.out)
    asked = {"role": "user", "content": "Which?"}
    assert found[0] == {
        "prompt": [asked], "question_id": 7, "sample": 0, "step": 1, "steps": 2, "answer": GOLD,
        "count": 3,
    }  # fmt: skip
    of_two = [asked, {"role": "assistant", "content": "look"},
              {"role": "user", "content": "seen look"}]  # fmt: skip
    assert (found[1]["prompt"], found[1]["count"], found[1]["step"]) == (of_two, 2, 2)
    assert [row["count"] for row in found] == [3, 2, 1, 1, 1, 1]
    assert [row.get("topic") for row in found] == [None, None, None, 3, 3, None]
    summary = json.loads(states.out.with_suffix(".summary.json").read_text())
    assert summary["filters"]["none"] == {"trajectories": 4, "sub_trajectories": 9, "states": 6}
    assert summary["trajectories"]["weights"] == "ab12" and summary["written"] == 6


def of_vectors():
    for i, case in enumerate(VECTORS["filters"]):
        last = len(case["process"]) - 1
        steps = [
            {"action": f"{i} {k}", "observation": None if k == last else "o", "process": process}
            for k, process in enumerate(case["process"])
        ]
        cut = case["name"].startswith("cut off")
        yield {**LINE, "question_id": i, "prompt": f"{i}?", "steps": steps,
               "outcome": case["outcome"], "truncated": cut}  # fmt: skip


@pytest.mark.parametrize("name", ["none", "process", "outcome", "both"])
def test_the_filters_of_the_vectors(states, name):
    """What the judge failed on is judged again, and bad."""
    with Server(lambda prompt: "NO") as server:
        code, out, error = states(list(of_vectors()), *judged_by(server), filter=name)
        assert code == 0, error
        assert len(server.asked) == (name in ("process", "both"))
    table = [line.split()[:3] for line in out.splitlines()]
    for each in ("none", "process", "outcome", "both"):
        kept = sum(case["kept"][each] for case in VECTORS["filters"])
        sizes = sum(case["sub_trajectories"][each] for case in VECTORS["filters"])
        assert [each, str(kept), str(sizes)] in table
    expected = sum(case["sub_trajectories"][name] for case in VECTORS["filters"])
    assert len(jsonl.read(states.out)) == expected
    assert ("1 steps without a label" in out) == (name in ("none", "outcome"))


def test_an_interrupted_command_resumes(states, monkeypatch):
    monkeypatch.setattr(judging, "AT_ONCE", 2)
    answered, most = [], [4]

    def few(prompt):
        return 400 if len(answered) >= most[0] else answered.append(prompt) or no_guess(prompt)

    with Server(few) as server:
        refused(
            states(LINES[:3], *judged_by(server)),
            "2 verdicts failed", "the first: the verifier judge on ", "t.jsonl, line 4, step 1: ",
        )  # fmt: skip
        assert len(jsonl.read(states.judged)) == 5 and not states.out.exists()
        with states.judged.open("a") as file:
            file.write('{"key": "half a line')
        most[0] = 99
        code, out, error = states(LINES[:3], *judged_by(server))
        assert code == 0, error
        assert len(answered) == 6, "what was judged is kept"
    assert len(jsonl.read(states.judged)) == 7 and "2 steps judged" in out


def test_verdicts_that_fail_now_and_then_are_counted_and_judged_again(states):
    answers = {"@@A": ["MAYBE", "YES"]}

    def sometimes(prompt):
        return answers.get(prompt[-3:], ["YES"])[0]

    lines = [LINES[0], trajectory(5, "look", "see", "C")]
    with Server(sometimes) as server:
        code, out, error = states(lines, *judged_by(server))
        assert code == 0, error
        assert "1 steps without a verdict, which the same command judges again" in out
        assert "line 2, step 2: " in out and ["process", "1", "3", "3"] in map(
            str.split, out.splitlines()
        )
        answers["@@A"].pop(0)
        code, out, _ = states(lines, *judged_by(server))
        assert code == 0 and "1 steps judged" in out and "without a" not in out


def test_a_judge_that_is_down(states):
    with Server(no_guess) as server:
        options = judged_by(server)
    refused(states(LINES, *options), "verdicts failed", "max_failed_fraction", "line 2, step 1")
    assert not states.out.exists()


def test_another_judge_or_another_file_of_verdicts_is_refused(states):
    with Server(no_guess) as server:
        assert states(LINES, *judged_by(server))[0] == 0
        other = judged_by(server, "reward.verifiers.judge.model=other")
        refused(states(LINES, *other), "has verdicts of another judge", "remove the file")
        for text in ("{}\n", "mine"):
            states.judged.write_text(text)
            refused(states(LINES, *judged_by(server)), "is no file of verdicts on steps")
            assert states.judged.read_text() == text
        states.judged.write_text('{"judged": 1, "re')
        assert states(LINES, *judged_by(server))[0] == 0, "a kill has cut its header"
        with states.judged.open("a") as file:
            file.write('{"key": 1}\n')
        refused(states(LINES, *judged_by(server)), "line 10 holds no verdict on a step")
        states.judged.unlink()
        said = states(LINES, *judged_by(server), judge={"verifier": "math"})
        refused(said, 'line 1: its judge is {"verifier": "math"}', "remove `process`")


def test_a_verifier_of_ones_own(states):
    lines = [trajectory(5, "look", "look"), LINES[0]]
    code, out, error = states(lines, "reward.verifier=tests.cli.states.verifiers:known")
    assert code == 0, error
    assert ["2", "2", "0.500"] in map(str.split, out.splitlines())
    assert [row["step"] for row in jsonl.read(states.out)] == [1, 2]


def test_verifiers_that_judge_no_steps(states):
    refused(states(LINES), "line 2, step 1 ", "reward.verifier=math judges steps")
    scored = ["reward.verifier=reward_model", "model.reward_hf_path=none"]
    refused(states(LINES, *scored), "line 2, step 1 is judged by reward_model")
    group = "reward.verifier=tests.cli.states.verifiers:together"
    refused(states(LINES, group), "sees the responses to a prompt together")
    refused(states(LINES, "reward.verifier=nobody"), "reward.verifier")


def test_nothing_left_says_what_each_filter_keeps(states):
    lines = [{**line, "outcome": False} for line in LINES]
    refused(
        states(lines, filter="outcome"),
        "nothing is left with --filter outcome: of 4 trajectories the filters keep "
        "none 4, process 0, outcome 0, both 0; give another filter",
    )
    assert not states.out.exists()


def test_calls_are_cut_behind_the_first_and_answers_end(states):
    tags = {"calls": ["s"], "answer": "a"}
    lines = [
        trajectory(0, "<s>x</s> and <s>y</s>\n", "well", "<a>1</a> as said"),
        trajectory(1, "<s>x</s>", "<a>1</a>"),
    ]
    code, out, error = states(lines, filter="none", tags=tags)
    assert code == 0, error
    assert "2 actions cut behind" in out and "1 actions malformed" in out
    found = jsonl.read(states.out)
    assert [row["prompt"][-2]["content"] for row in found[1:]] == ["<s>x</s>", "well", "<s>x</s>"]
    asked = "an observation follows it; remove what follows, or the line"
    wrong = trajectory(1, "<a>1</a>", "<a>2</a>")
    refused(states([wrong], filter="none", tags=tags), "line 2: steps[0].action", asked)


@pytest.fixture
def model(tmp_path):
    """A chat model, and the options that name it."""
    place = tmp_path / "model"
    write_tiny_hf(place, num_layers=1, hidden=128, ffn=32, vocab=SIZE)
    for name in ("config", "generation_config"):
        file = place / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": 2}))
    write_chat_tokenizer(place, template=CHATML)
    return place, [f"model.hf_path={place}", "rollout.max_prompt_tokens=256"]


def test_what_is_written_is_read_as_training_data(states, model):
    place, options = model
    weights = weights_digest(place)
    code, out, error = states(LINES, *options, filter="none", weights=weights)
    assert code == 0 and "warning" not in error, error
    tokenizer = load_tokenizer(place)
    dataset = read_prompts(
        str(states.out), DataConfig(), tokenizer, seed=0, shuffle=False, max_prompt_tokens=256
    )
    assert len(dataset) == 6
    second = dataset.rows[1]
    assert second.prompt == (
        "<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\nlook<|im_end|>\n"
        "<|im_start|>user\nseen look<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.answer == GOLD and second.metadata["count"] == 2 and second.verifier is None


def test_the_judge_reads_a_chat_as_the_model_does(states, model):
    place, options = model
    with Server(no_guess) as server:
        options = [*options, *judged_by(server)]
        assert states(LINES[:1], *options, weights=weights_digest(place))[0] == 0
        asked = [body["messages"][0]["content"] for body in server.asked]
    assert "<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n@@look" in asked


def test_states_longer_than_the_context_are_left_out(states, model):
    place, options = model
    weights = weights_digest(place)
    whole = states(LINES, *options, filter="none", weights=weights)
    assert "0 states left out: over 256 prompt tokens" in whole[1]
    cut = states(LINES, *options, "rollout.max_prompt_tokens=40", filter="none", weights=weights)
    assert "4 states left out: over 40 prompt tokens" in cut[1] and "2 states written" in cut[1]
    assert {row["step"] for row in jsonl.read(states.out)} == {1}
    none = states(LINES, *options, "rollout.max_prompt_tokens=4", filter="none", weights=weights)
    refused(none, "nothing is left: all 6 states have more than rollout.max_prompt_tokens=4")


def test_another_models_trajectories(states, model):
    _, options = model
    refused(
        states(LINES, *options, filter="none"),
        "the header's weights='ab12' are another model's", "or give --other-model",
    )  # fmt: skip
    code, _, error = states(LINES, *options, "--other-model", filter="none")
    assert code == 0, error


def test_a_chat_whose_turns_do_not_end_is_refused(states, model):
    place, options = model
    weights = weights_digest(place)
    options = [*options, "rollout.stop_token_ids=[0]"]
    refused(
        states(LINES, *options, filter="none", weights=weights),
        "ends a turn with <|im_end|> (2), which is no stop token (they are 0)",
        "set rollout.stop_token_ids=[0,2]",
    )
    ends = ["k", "s"]
    said = states(LINES, *options, filter="none", weights=weights, ends=ends)
    refused(said, "rollout.stop_token_ids must have ", "(stop tokens are 0)")
    two = states(LINES, *options, filter="none", weights=weights, ends=["ok"])
    refused(two, "the header's ends have 'ok', which is 2 tokens")


def test_texts_end_at_one_token(states, tmp_path):
    place = tmp_path / "words"
    write_tiny_model(place, num_layers=1, hidden=128, ffn=32, vocab=64)
    weights = weights_digest(place)
    options = [f"model.hf_path={place}", "rollout.stop_token_ids=[2,9]"]
    about = {"filter": "none", "chat": False, "ends": ["w9"], "weights": weights}
    lines = [trajectory(0, "w5 w9", "w6", prompt="w3 ")]
    code, _, error = states(lines, *options, **about)
    assert code == 0, error
    (problem, after) = load_problems(states.out)
    assert (problem.prompt, after.prompt) == ("w3 ", "w3 w5 w9seen w5 w9")
    refused(states(lines, options[0], **about), "rollout.stop_token_ids must have 9")
    joined = [trajectory(0, "w5w9", "w6", prompt="w3 ")]
    refused(states(joined, *options, **about), "steps[0].action='w5w9' ends within the token")
    bare = [trajectory(0, "w5", "w6", prompt="w3 ")]
    refused(states(bare, *options, **about), "steps[0].action ends with 'w5', but an action must")
    said = states(bare, filter="none", chat=False)
    refused(said, "an action must end at one of the header's ends, []")


def test_what_no_tokenizer_checks_is_said(states):
    code, _, error = states(LINES, filter="none")
    assert code == 0 and error.startswith("warning: without model.hf_path it is not checked")


def test_states_that_cannot_be_prompts_are_refused(states):
    said = states([{**LINES[0], "tools": "none"}], filter="none")
    refused(said, "line 2, step 1: tools='none' must be a list of JSON schemas")


def test_options_that_are_refused(tmp_path, capsys):
    file = tmp_path / "t.jsonl"
    file.write_text("")
    for arguments, said in (
        ([file, "--filter", "none", "--out", tmp_path / "s.parquet"], "must end in .jsonl"),
        ([file, "--filter", "none", "--out", file], "is the file of trajectories"),
        ([file, "--filter", "good", "--out", tmp_path / "s.jsonl"], "invalid choice: 'good'"),
        ([file, "--out", tmp_path / "s.jsonl"], "required: --filter"),
        ([file, "--filter", "none", "--out", tmp_path / "s.jsonl", "a.b=1"], "unknown field a"),
        ([file, "--filter", "none", "--out", tmp_path / "s.jsonl"], "is no header of trajectories"),
    ):
        assert main(["states", *map(str, arguments)]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "old.jsonl").write_text("")
    arguments = [file, "--filter", "none", "--out", tmp_path / "old.jsonl"]
    assert main(["states", *map(str, arguments)]) == 2
    assert "exists; give another file, or --overwrite" in capsys.readouterr().err
    assert Path(tmp_path / "old.jsonl").read_text() == ""
