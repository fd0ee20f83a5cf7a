"""The report of a synthetic run directory, whole and partial, and vapo report.

Not exercised: the drawing of the curves (the page's script runs in browsers alone) and real runs.
"""

import base64
import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests import jsonl
from tests.alone import loaded_by
from vapo_megatron.config import VapoConfig, load_config
from vapo_megatron.data.rollout import Prompt, Rollout, ScoredRollout
from vapo_megatron.errors import DataError
from vapo_megatron.run.metrics import MetricsWriter
from vapo_megatron.run.report.html import escape, script_json
from vapo_megatron.run.report.page import build_report
from vapo_megatron.run.token_records import group_records

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)> {{config}} & \"'"
NUM_STEPS, PRETRAINING = 34, 14


def write_run(run_dir: Path, num_steps=NUM_STEPS, pretraining=PRETRAINING, evaluate=True) -> Path:
    """Write a run as training writes it, with figures like those of the tiny example."""
    rng = random.Random(0)
    run_dir.mkdir(parents=True)
    config = run_dir.parent / "config_in.yaml"
    config.write_text("{}")
    overrides = [
        "model.hf_path=examples/tiny/base", "parallel.world_size=2", "model.dtype=float32",
        "parallel.tensor_model_parallel_size=2", "algorithm.responses_per_step=256",
        "algorithm.mini_batch_size=64", "algorithm.length_adaptive_alpha=0.2",
        f"algorithm.value_pretraining_steps={pretraining}", "evaluation.samples=8",
        f"algorithm.policy_steps={NUM_STEPS - pretraining}", "rollout.max_response_tokens=192",
    ]  # fmt: skip
    (run_dir / "config.yaml").write_text(load_config(config, overrides).to_yaml())
    with MetricsWriter(run_dir, tensorboard=False) as writer:
        if evaluate:
            seconds = {"time/evaluation_seconds": 5.1, "time/step_seconds": 5.2}
            writer.write(0, {"evaluation/avg@8": 0.142, **seconds})
        for step in range(1, num_steps + 1):
            writer.write(step, _row(step, pretraining, rng, evaluate))
            groups = [_group(step, index, pretraining, rng) for index in range(2)]
            writer.write_rollouts(step, groups)
    return run_dir


def _progress(step: int, pretraining: int) -> float:
    """0 before the policy trains, near 1 at the end."""
    policy = max(0, step - pretraining)
    return 1 / (1 + math.exp(-(policy - 7) / 2.2)) - 1 / (1 + math.exp(7 / 2.2))


def _row(step: int, pretraining: int, rng: random.Random, evaluate: bool) -> dict:
    learned = _progress(step, pretraining)
    accuracy = 0.14 + 0.8 * learned + rng.gauss(0, 0.015)
    trained = min(1.0, step / 8)
    row = {
        "reward/mean": 2 * accuracy - 1,
        "reward/correct_fraction": accuracy,
        "rollout/response_length_mean": 21 + 88 * learned + rng.gauss(0, 2),
        "rollout/response_length_max": 173 + rng.randint(-3, 0),
        "rollout/truncated_fraction": 0.004,
        "rollout/logprob_diff_mean": 2e-7 * math.exp(rng.gauss(0, 0.2)),
        "rollout/logprob_diff_max": 4e-6 * math.exp(rng.gauss(0, 0.3)),
        "critic/loss": 0.5 * (1 - 0.8 * trained) + 0.05 * abs(rng.gauss(0, 1)),
        "critic/explained_variance": -0.4 + 1.2 * trained - 0.1 * abs(rng.gauss(0, 0.3)),
        "critic/value_mean": accuracy * 2 - 1,
        "critic/grad_norm": 2.5 * math.exp(-step / 20 + rng.gauss(0, 0.2)),
        "critic/learning_rate": 1e-3 - 6e-5 * min(step, 14),
        "algorithm/lambda_actor_mean": 0.71 + 0.22 * learned,
        "tokens_per_second": 5200 + rng.gauss(0, 300),
        "memory/peak_bytes": 3_400_000_000 + 1_000_000 * step,
    }
    times = {"generation": 1.1, "reward": 0.15, "exchange": 0.02, "values": 0.2, "logprobs": 0.2,
             "advantages": 0.01, "critic_update": 0.8}  # fmt: skip
    if step == 1:
        times["generation"] = 9.5
    if step > pretraining:
        times |= {"actor_update": 0.9, "sync": 0.05}
        row |= {
            "actor/loss": 0.02 * rng.gauss(0, 1),
            "actor/policy_loss": 0.02 * rng.gauss(0, 1) - 0.01,
            "actor/positive_lm_loss": 0.35 - 0.2 * learned,
            "actor/entropy": 0.62 - 0.35 * learned + rng.gauss(0, 0.01),
            "actor/approx_kl": 0.004,
            "actor/clip_fraction_low": 0.01 + 0.004 * rng.random(),
            "actor/clip_fraction_high": 0.018 + 0.006 * rng.random(),
            "actor/first_ratio_diff_max": 2e-6,
            "actor/grad_norm": 0.8 * math.exp(rng.gauss(0, 0.2)),
        }
    if step % 10 == 0:
        times["checkpoint"] = 0.7
    if evaluate and step in (24, NUM_STEPS):
        times["evaluation"] = 4.8
        row["evaluation/avg@8"] = 0.142 + 0.79 * learned
    row |= {f"time/{k}_seconds": v * math.exp(rng.gauss(0, 0.05)) for k, v in times.items()}
    return row | {"time/step_seconds": sum(times.values()) * 1.04}


def _group(step: int, index: int, pretraining: int, rng: random.Random) -> dict:
    learned = _progress(step, pretraining)
    prompt = Prompt(100 * step + index, f"Qa{step % 10}b*2c-3d+1=", (1, 2), "7")
    scored = []
    for sample in range(16):
        text, status = f"A{rng.randint(0, 6)}E", "wrong"
        if rng.random() < learned + 0.1:
            text, status = "b*2=4nopqrstuvwx,c-3=1nopqrstuvwx,d+1=7nopqrstuvwx,A7E", "correct"
        elif rng.random() < 0.1:
            text, status = "b*2~4nopqrstuvwx," * 10, "unparsable"
        truncated = status == "unparsable"
        ids = tuple(range(len(text)))
        rollout = Rollout(prompt, sample, sample, ids, (0.0,) * len(ids), truncated, 0)
        scored.append(ScoredRollout(rollout, text, status, 1.0 if status == "correct" else -1.0))
    return group_records(scored, {}, None)[0]


class Page(HTMLParser):
    """Tags, attributes and visible text of a page, as a browser's parser would see them."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.visible = self.inside = ""
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.inside = tag
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.visible += data

    def handle_endtag(self, tag):
        self.inside = ""

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def page(run_dir) -> Page:
    return Page(build_report(run_dir).read_text(encoding="utf-8"))


def series(page: Page, title: str) -> list[dict]:
    return next(c for c in page.data["charts"] if c["title"] == title)["series"]


def test_every_curve_holds_the_rows_numbers(run_dir, page):
    rows = jsonl.read(run_dir / "metrics.jsonl")
    curves = {
        "Accuracy": ["evaluation/avg@8", "reward/correct_fraction"],
        "Reward": ["reward/mean"],
        "Response length": ["rollout/response_length_mean", "rollout/response_length_max"],
        "Entropy": ["actor/entropy"],
        "Explained variance": ["critic/explained_variance"],
        "Value loss": ["critic/loss"],
        "Sampler-trainer difference": ["rollout/logprob_diff_mean", "rollout/logprob_diff_max"],
        "Clip fractions": ["actor/clip_fraction_low", "actor/clip_fraction_high"],
        "Gradient norm": ["actor/grad_norm", "critic/grad_norm"],
        "Lambda of the actor": ["algorithm/lambda_actor_mean"],
        "Positive-example LM loss": ["actor/positive_lm_loss"],
        "Tokens per second": ["tokens_per_second"],
    }
    assert [c["title"] for c in page.data["charts"]] == list(curves)
    for title, names in curves.items():
        expected = [[[r["step"], r[n]] for r in rows if n in r] for n in names]
        assert [s["points"] for s in series(page, title)] == expected, title
    steps = [row["step"] for row in rows]
    assert page.data["steps"] == page.data["phases"]["steps"] == steps
    phases = {p["label"]: p["seconds"] for p in page.data["phases"]["series"]}
    assert len(phases) == 11
    assert phases["actor update"] == [r.get("time/actor_update_seconds", 0.0) for r in rows]
    assert page.data["pretraining"] == PRETRAINING
    assert [step for step, _ in series(page, "Accuracy")[0]["points"]] == [0, 24, 34]


def test_curves_of_episodes(tmp_path):
    numbers = {
        "rollout/turns_mean": 3.0, "rollout/observation_tokens_mean": 40.0,
        "rollout/turn_reward_mean": 0.25, "rollout/environment_failed_fraction": 0.125,
        "rollout/cut_by_turns_fraction": 0.5, "rollout/cut_by_action_fraction": 0.25,
        "rollout/failed_calls_mean": 1.5,
        "time/environment_seconds": 0.75, "time/environment_waiting_seconds": 0.0,
    }  # fmt: skip
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, numbers)
    page = Page(build_report(tmp_path).read_text())
    assert page.data["more"] == []
    shown = [s["points"] for chart in page.data["charts"] for s in chart["series"]]
    assert sorted(shown) == sorted([[1, number]] for number in numbers.values())
    titles = [chart["title"] for chart in page.data["charts"]]
    assert len(titles) == 6 and titles[0] == "Turns of an episode"


def test_bars_of_many_steps_are_their_means(tmp_path):
    times = [(1.0, 3.0)] * 100 + [(2.0, None)] * 100 + [(4.0, 0.0)]
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step, (generation, sync) in enumerate(times, 1):
            row = {"time/generation_seconds": generation}
            if sync is not None:
                row["time/sync_seconds"] = sync
            writer.write(step, row)
    page = Page(build_report(tmp_path).read_text())
    phases = page.data["phases"]
    # 201 steps for at most 160 bars: two a bar, the last alone.
    assert phases["title"] == "Seconds per phase, mean of 2 steps" and phases["room"] == 1
    assert phases["steps"] == [*(n + 0.5 for n in range(1, 200, 2)), 201]
    generation, sync = phases["series"]
    assert generation["seconds"] == [1.0] * 50 + [2.0] * 50 + [4.0]
    assert sync["seconds"] == [3.0] * 50 + [0.0] * 51
    # 304 of 604 seconds.
    assert (generation["share"], sync["share"]) == ("50 %", "50 %")
    assert page.data["charts"] == [] and len(page.data["steps"]) == 201


def test_what_no_curve_names_is_among_the_others(page):
    titles = {chart["title"] for chart in page.data["more"]}
    assert {"critic/learning_rate", "actor/loss", "actor/first_ratio_diff_max"} <= titles
    assert not any(title.startswith(("time/", "evaluation/avg")) for title in titles)
    memory = next(c for c in page.data["more"] if c["title"] == "memory/peak_bytes")
    # 3,401,000,000 bytes at step 1, / 2^30.
    assert memory["unit"] == "GiB" and memory["series"][0]["points"][0] == [
        1,
        3_401_000_000 / 2**30,
    ]


def test_headline_numbers(run_dir, page):
    rows = jsonl.read(run_dir / "metrics.jsonl")
    assert f"0.142\u2192{rows[-1]['evaluation/avg@8']:.3f}" in page.visible
    assert "avg@8, steps 0 and 34" in page.visible
    assert "14 value pretraining, 20 policy" in page.visible
    total = round(sum(row["time/step_seconds"] for row in rows))
    assert f"{total // 60} m {total % 60:02} s" in page.visible


def test_the_page_needs_nothing_from_outside(run_dir, page):
    text = (run_dir / "report.html").read_text()
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", text))
    # Where the chart library comes from, in a comment.
    assert addresses == {"https://github.com/leeoniya/uPlot"}
    assert "@import" not in text and "url(" not in text and text.isascii()


def test_the_chart_library_is_the_named_version_and_its_licence_goes_along(run_dir):
    library = ROOT / "vapo_megatron" / "run" / "report" / "uplot"
    readme = (library / "README.md").read_text()
    named = dict(re.findall(r"([0-9a-f]{64})  (\S+)", readme))
    found = {hashlib.sha256((library / n).read_bytes()).hexdigest(): n for n in named.values()}
    assert found == named and len(named) == 3
    version = re.search(r"Version: ([\d.]+)", readme)[1]
    text = (run_dir / "report.html").read_text()
    assert f"https://github.com/leeoniya/uPlot (v{version}) */" in text
    assert f"/*! {(library / 'LICENSE').read_text()}*/" in text


def test_model_text_is_inert(tmp_path):
    run_dir = write_run(tmp_path / "<u>run", num_steps=1)
    file = run_dir / "rollouts" / "step_000001.jsonl"
    group = jsonl.read(file)[0]
    group["prompt"] = group["answer"] = HOSTILE
    for response in group["responses"]:
        response["text"] = HOSTILE + "\ud800"
    group["responses"][0]["status"] = '"><script>'
    jsonl.write(file, [group])
    config = run_dir / "config.yaml"
    config.write_text(
        config.read_text().replace("answer_column: answer", "answer_column: <script>x</script>")
    )
    text = build_report(run_dir).read_text(encoding="utf-8")
    page = Page(text)
    assert text.count("<script") == 2 and page.tags.count("script") == 2
    assert not {"img", "u"} & set(page.tags)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    # Shown as it is: 16 responses, prompt and answer, each whole; a preview of each but the answer.
    assert page.visible.count(HOSTILE) == 16 + 2 + 16 + 1
    assert "<script>x</script>" in page.visible and "<u>run" in page.visible


def test_text_cannot_leave_its_attribute_or_script():
    assert not set(escape(HOSTILE)) & set("<>\"'")
    assert "<" not in script_json([HOSTILE]) and json.loads(script_json([HOSTILE])) == [HOSTILE]


def test_only_the_page_s_own_script_may_run(run_dir, page):
    policy = next(v for n, v in page.attributes if n == "content" and "script-src" in v)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy


def test_verdicts_rewards_and_truncation_of_responses_are_shown(run_dir, page):
    text = (run_dir / "report.html").read_text()
    # Twelve of 34 steps, first and last among them: every third.
    assert re.findall(r"<h3>Step (\d+)</h3>", text) == list(map(str, range(1, 35, 3)))
    assert text.count('<details class="group">') == 24
    assert text.count('<details class="response ') == 24 * 16
    group = jsonl.read(run_dir / "rollouts" / "step_000034.jsonl")[0]
    correct = sum(r["status"] == "correct" for r in group["responses"])
    assert f"{correct}/16" in text and "truncated</span>" in text
    assert page.visible.count("+1.00") == text.count('<details class="response correct">') > 0


def test_long_responses_are_cut_in_the_middle(tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=1)
    file = run_dir / "rollouts" / "step_000001.jsonl"
    group = jsonl.read(file)[0]
    group["responses"][0]["text"] = "BEGIN" + "x" * 100_000 + "END"
    jsonl.write(file, [group])
    text = build_report(run_dir).read_text()
    # 100,008 - 8,000 characters.
    assert "92,008 characters" in text and "BEGIN" in text and "xEND" in text
    assert max(map(len, re.findall(r"x+", text))) < 5_000


def test_techniques_show_their_settings_and_whether_they_are_on(page, run_dir, tmp_path):
    text = (run_dir / "report.html").read_text()
    assert text.count('<li class="on">') == 7 and "length_adaptive_alpha = 0.2" in text
    (tmp_path / "config.yaml").write_text(
        "algorithm: {value_pretraining_steps: 0, lambda_critic: same_as_actor, lambda_actor: 0.95,"
        " clip_high: 0.2, loss_aggregation: sample, positive_lm_coef: 0.0, group_size: 1}"
    )
    text = build_report(tmp_path).read_text()
    assert text.count('<li class="off">') == 7
    (tmp_path / "config.yaml").write_text("algorithm: {lambda_critic: 0.95, lambda_actor: 0.95}")
    text = build_report(tmp_path).read_text()
    states = re.findall(r'<li class="(\w+)"><div class="head"><b>(\d)', text)
    # Equal lambdas are not decoupled, and 0.95 is not adaptive.
    assert {number for state, number in states if state == "off"} == {"2", "3"}
    (tmp_path / "config.yaml").write_text(
        "algorithm: {value_pretraining_steps: 0}\nmodel: {critic_checkpoint: runs/values}"
    )
    text = build_report(tmp_path).read_text()
    assert text.count('<li class="on">') == 7 and "critic_checkpoint = runs/values" in text


@pytest.mark.parametrize(
    "stage,told", [("all", "3<small> of 9</small>"), ("value_pretraining", "3")]
)
def test_a_stage_of_its_own_has_no_policy_steps_to_come(tmp_path, stage, told):
    algorithm = {"stage": stage, "value_pretraining_steps": 3, "policy_steps": 6}
    (tmp_path / "config.yaml").write_text(json.dumps({"algorithm": algorithm}))
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(3, {})
    text = build_report(tmp_path).read_text()
    assert f'<div class="label">Steps</div><div class="value">{told}</div>' in text


@pytest.mark.parametrize(
    "algorithm,title",
    [
        ({}, "VAPO run"),
        ({"clip_high": 0.2}, "VAPO without clip-higher run"),
        (
            {"lambda_critic": 0.95, "lambda_actor": 0.95, "positive_lm_coef": 0.0},
            "VAPO without decoupled GAE, length-adaptive GAE, positive-example LM loss run",
        ),
        (
            {"value_pretraining_steps": 0, "lambda_critic": 0.95, "lambda_actor": 0.95,
             "clip_high": 0.2, "loss_aggregation": "sample", "positive_lm_coef": 0.0},
            "PPO with group sampling run",
        ),
        ({"stage": "value_pretraining"}, "Value pretraining run"),
        ({"advantage_estimator": "grpo", "group_size": 8}, "GRPO run"),
        ({"advantage_estimator": "dr_grpo", "dynamic_sampling": True}, "Dr.GRPO run"),
    ],
)  # fmt: skip
def test_a_page_is_called_by_its_algorithm(tmp_path, algorithm, title):
    """Recipes are in tests/examples/test_recipes.py."""
    (tmp_path / "config.yaml").write_text(json.dumps({"algorithm": algorithm}))
    text = build_report(tmp_path).read_text()
    assert f'<div class="kicker">{title}</div>' in text and f" - {title}</title>" in text


def test_configuration_marks_what_differs_from_the_default(run_dir):
    text = (run_dir / "report.html").read_text()
    row = '<tr class="changed" title="default: 8192"><th>responses_per_step</th><td>256</td>'
    assert row in text
    assert "<tr><th>group_size</th><td>16</td>" in text
    fields = sum(len(section) for section in VapoConfig().model_dump().values() if section)
    assert text.count("<tr") == fields + 1  # and the seed


@pytest.mark.parametrize("kind", ["one step", "evaluation only", "config only", "no config"])
def test_partial_runs(tmp_path, kind):
    run_dir = write_run(tmp_path / "run", num_steps=1, evaluate=kind == "evaluation only")
    metrics = run_dir / "metrics.jsonl"
    if kind == "evaluation only":
        metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    if kind == "config only":
        metrics.unlink()
        (run_dir / "rollouts" / "step_000001.jsonl").unlink()
    if kind == "no config":
        (run_dir / "config.yaml").unlink()
    page = Page(build_report(run_dir).read_text())
    titles = [chart["title"] for chart in page.data["charts"]]
    if kind == "evaluation only":
        assert titles == ["Accuracy"] and "avg@8, step 0" in page.visible
    elif kind == "config only":
        assert titles == [] and "0 of 34" in page.visible and "\u2192" not in page.visible
        assert "No responses were kept." in page.visible
    else:
        assert [s["label"] for s in series(page, "Accuracy")] == ["training"]
        assert series(page, "Reward")[0]["points"][0][0] == 1 and "Entropy" not in titles
        assert ("config.yaml not found" in page.visible) == (kind == "no config")
        # What nobody knows is neither on nor off.
        assert (("class", "techniques") in page.attributes) == (kind != "no config")


def test_numbers_that_were_not_finite_stay_in_the_curves(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step, loss in ((1, 0.5), (2, math.nan), (3, 0.4)):
            writer.write(step, {"critic/loss": loss})
    page = Page(build_report(tmp_path).read_text())
    assert series(page, "Value loss")[0]["points"] == [[1, 0.5], [2, None], [3, 0.4]]


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="not a run directory.*logging.run_dir"):
        build_report(tmp_path)


def test_command_line(run_dir, tmp_path):
    command = [sys.executable, "-m", "vapo_megatron", "report"]
    given = {"capture_output": True, "text": True, "cwd": tmp_path}
    given["env"] = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(run_dir)], **given)
    assert done.returncode == 0 and done.stdout.strip() == str(run_dir / "report.html")
    done = subprocess.run([*command, str(tmp_path)], **given)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "is not a run directory" in done.stderr


def test_the_command_needs_neither_torch_nor_megatron(run_dir):
    code = """
        import sys
        from vapo_megatron.run.report.page import build_report
        build_report(sys.argv[1])
    """
    assert loaded_by(code, ("torch", "megatron", "vllm"), run_dir) == []
