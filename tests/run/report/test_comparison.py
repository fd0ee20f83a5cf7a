"""The page that compares runs, from synthetic run directories, and vapo report of several.

Not exercised: the drawing of the curves, which browsers alone do.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import jsonl
from tests.run.report.test_page import PRETRAINING, Page, write_run
from vapo_megatron.config import load_config
from vapo_megatron.errors import DataError
from vapo_megatron.run.report.comparison import build_comparison, table

HERE = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """The same run, without value pretraining, and with an unfinished third one."""
    root = tmp_path_factory.mktemp("compared")
    runs = [write_run(root / "a" / "<u>vapo"), write_run(root / "b" / "none", pretraining=0)]
    runs.append(write_run(root / "c", num_steps=PRETRAINING, evaluate=False))
    return runs


@pytest.fixture(scope="module")
def text(runs) -> str:
    out = build_comparison(runs)
    assert out == runs[2].parent / "comparison.html"
    return out.read_text(encoding="utf-8")


def rows(run: Path) -> list[dict]:
    return jsonl.read(run / "metrics.jsonl")


def cells(text: str, title: str) -> list[str]:
    """What a table's row shows, without its markup."""
    text = text.replace("<wbr>", "")
    row = re.search(rf'<th scope="row">{re.escape(title)}</th>(.*?)</tr>', text)
    assert row, f"no row {title}"
    return [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td>(.*?)</td>", row[1])]


def test_each_curve_holds_its_run_s_numbers(runs, text):
    charts = {chart["title"]: chart["series"] for chart in Page(text).data["charts"]}
    wanted = {
        "Held-out accuracy": "evaluation/avg@8",
        "Training accuracy": "reward/correct_fraction",
        "Response length": "rollout/response_length_mean",
        "Entropy": "actor/entropy",
        "Explained variance": "critic/explained_variance",
        "KL from the old policy": "actor/approx_kl",
        "Clip fraction, low": "actor/clip_fraction_low",
        "Clip fraction, high": "actor/clip_fraction_high",
    }
    assert set(wanted) <= set(charts)
    for title, name in wanted.items():
        expected = [[[r["step"], r[name]] for r in rows(run) if name in r] for run in runs]
        # The third run has neither evaluated nor trained its actor.
        assert [s["points"] for s in charts[title]] == [points for points in expected if points]
    assert [s["label"] for s in charts["Reward"]] == ["a/<u>vapo", "b/none", "c"]
    assert charts["Held-out accuracy"][1]["label"] == "b/none avg@8"


def test_a_run_keeps_its_look_in_every_chart_and_no_two_runs_share_one(tmp_path):
    names = [f"run_{i:02}" for i in range(12)]
    for name in names:
        (tmp_path / name).mkdir()
        metrics = [{"step": 1, "reward/mean": 0.5}, {"step": 2, "critic/loss": 0.1}]
        kept = metrics[1:] if name == "run_00" else metrics
        jsonl.write(tmp_path / name / "metrics.jsonl", kept)
    page = build_comparison([tmp_path / name for name in names]).read_text()
    looks = [
        {s["label"]: (s["color"], s["dash"]) for s in chart["series"]}
        for chart in Page(page).data["charts"]
    ]
    assert [len(chart) for chart in looks] == [11, 12] and looks[0].items() <= looks[1].items()
    assert len(set(looks[1].values())) == 12


def test_final_and_best_values(runs, text):
    loss = [[(r["critic/loss"], r["step"]) for r in rows(run)[-PRETRAINING:]] for run in runs]
    assert cells(text, "Value loss, final") == [f"{values[-1][0]:.4g}" for values in loss]
    values = [[(r["reward/mean"], r["step"]) for r in rows(run) if r["step"]] for run in runs]
    best = [max(v) for v in values]
    assert cells(text, "Reward, best") == [f"{value:.4g} step {step}" for value, step in best]
    lowest = [min((r["critic/loss"], r["step"]) for r in rows(run) if r["step"]) for run in runs]
    assert cells(text, "Value loss, best") == [f"{v:.4g} step {s}" for v, s in lowest]
    assert cells(text, "Entropy, final")[2] == "-" and "Entropy, best" not in text
    # The best of the runs stands out, and it alone.
    row = re.search(r'<th scope="row">Reward, best</th>(.*?)</tr>', text)[1]
    assert re.findall(r"<b>(.*?)</b>", row) == [f"{max(best)[0]:.4g}"]


def test_only_fields_that_differ_are_listed(runs, text):
    table = text.split("Where they differ")[1].split("<h2>")[0].replace("<wbr>", "")
    names = re.findall(r'<th scope="row">(.*?)</th>', table)
    # 34 steps in all: the policy has what value pretraining leaves.
    assert sorted(names) == ["algorithm.policy_steps", "algorithm.value_pretraining_steps"]
    assert cells(table, "algorithm.value_pretraining_steps") == ["14", "0", "14"]
    assert cells(table, "algorithm.policy_steps") == ["20", "34", "20"]
    assert Page(text).data["pretraining"] == 0


def test_runs_with_one_configuration(tmp_path):
    runs = [write_run(tmp_path / name, num_steps=2) for name in ("one", "two")]
    for run in runs:
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["logging"]["run_dir"] = str(run)
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    text = build_comparison(runs).read_text()
    assert "No field differs." in text and Page(text).data["pretraining"] == PRETRAINING


def metrics_of(run: Path, values: list[float | None], name: str = "reward/mean", **config) -> Path:
    """A run directory with one metric, at steps 1, 2, ..."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump({"seed": 0, **config}))
    rows = [{"step": step, name: value} for step, value in enumerate(values, 1)]
    jsonl.write(run / "metrics.jsonl", rows)
    return run


@pytest.mark.parametrize("layout", ["{arm}/seed_{seed}", "seed_{seed}/{arm}"])
def test_runs_of_several_seeds_are_an_arm(tmp_path, layout):
    values = {"ppo": [[0.5, 0.25], [0.0, -0.25], [0.25, 0.75]], "vapo": [[0.5, 0.75, 1.0], [0.25]]}
    runs = [
        metrics_of(
            tmp_path / layout.format(arm=arm, seed=seed),
            found,
            seed=seed,
            algorithm={"clip_high": 0.2 if arm == "ppo" else 0.28},
            model={"hf_path": f"seed_{seed}/base"},
        )
        for arm, of_arm in values.items()
        for seed, found in enumerate(of_arm)
    ]
    text = build_comparison(runs, by_arm=True, lead="<p>first</p>").read_text()
    page = Page(text)
    assert "2 arms, 5 runs" in page.visible and "<p>first</p>" in text
    assert "ppo 3 runs, 2 steps" in page.visible and "vapo 2 runs, 1 to 3 steps" in page.visible
    ppo, vapo = page.data["charts"][0]["series"]
    # Step 1: .5, 0, .25; step 2: .25, -.25, .75. The second run of the other has step 1 alone.
    assert ppo["points"] == [[1, 0.25, 0.0, 0.5], [2, 0.25, -0.25, 0.75]] and ppo["arm"] == 0
    assert vapo["points"] == [[1, 0.375, 0.25, 0.5]] and vapo["arm"] == 1
    # Last values .25, -.25, .75 and 1, .25; best ones .5, 0, .75 and 1, .25.
    assert cells(text, "Reward, final") == ["0.25 -0.25 to 0.75", "0.625 0.25 to 1"]
    assert cells(text, "Reward, best") == ["0.4167 0 to 0.75", "0.625 0.25 to 1"]
    row = re.search(r'<th scope="row">Reward, final</th>(.*?)</tr>', text)[1]
    assert re.findall(r"<b>(.*?)</b>", row) == ["0.625"]
    # Seeds differ within the arms; each arm's are named, for one has three and the other two.
    names = re.findall(r'<th scope="row">(.*?)</th>', text.replace("<wbr>", ""))
    assert names[:3] == ["algorithm.clip_high", "model.hf_path", "seed"]
    assert cells(text, "algorithm.clip_high") == ["0.2", "0.28"]
    assert cells(text, "seed") == ["0 1 2", "0 1"]
    text = build_comparison([*runs[:2], *runs[3:]], by_arm=True).read_text()
    names = re.findall(r'<th scope="row">(.*?)</th>', text.replace("<wbr>", ""))
    assert names[0] == "algorithm.clip_high" and "seed" not in names
    # Without the flag every run stands alone.
    assert len(Page(build_comparison(runs).read_text()).data["charts"][0]["series"]) == 5


def test_one_arm_alone_and_values_that_are_not_finite(tmp_path):
    runs = [metrics_of(tmp_path / "x/seed_0", [0.5, None]), metrics_of(tmp_path / "x/seed_1", [1])]
    runs += [metrics_of(tmp_path / "x/seed_2", [0.5], "critic/loss")]
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": 0.5}\n')
    text = build_comparison(runs, by_arm=True).read_text()
    page = Page(text)
    assert "1 arm, 3 runs" in page.visible and "x 3 runs, 1 to 2 steps" in page.visible
    # The third run never had the metric. At step 2 it was not finite in one run.
    (reward,) = page.data["charts"][0]["series"]
    assert reward["points"] == [[1, 0.75, 0.5, 1], [2, None, None, None]]
    assert cells(text, "Reward, final") == ["0.5 0.5 to 0.5"]
    assert cells(text, "Value loss, final") == ["0.5"]


def test_fields_that_few_have_stand_out(tmp_path):
    clips = (0.28, 0.28, 0.2)
    runs = [
        metrics_of(tmp_path / str(i), [0.5], algorithm={"clip_high": c}, lr=i)
        for i, c in enumerate(clips)
    ]
    text = build_comparison(runs).read_text()
    rows = dict(re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', text.replace("<wbr>", "")))
    assert rows["algorithm.clip_high"] == "<td>0.28</td><td>0.28</td><td><b>0.2</b></td>"
    assert "<b>" not in rows["lr"], "each has its own"


def test_the_page_is_whole_and_inert(text):
    page = Page(text)
    assert not {"link", "img", "u"} & set(page.tags) and page.tags.count("script") == 2
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    assert set(re.findall(r"https?://[^\s\"'<>]+", text)) == {"https://github.com/leeoniya/uPlot"}
    assert not re.search(r"\{\{\w+\}\}", text) and "a/<u>vapo" in page.visible


def luminance(color: str) -> float:
    """Relative luminance of #rrggbb, WCAG 2.1."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}  # fmt: skip


def seen(color: str, matrix) -> list[float]:
    """CIELAB of a color as seen through the matrix."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    rgb = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    r, g, b = [min(1, max(0, sum(m * c for m, c in zip(row, rgb)))) for row in matrix]
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = [v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz]
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("eye", list(BLINDNESS))
def test_colours_can_be_told_apart(text, scheme, eye):
    block = text.split(":root {")[1 if scheme == "light" else 2].split("}")[0]
    card = re.search(r"--card: (#\w{6})", block)[1]
    colors = re.findall(r"--series\d: (#\w{6})", block)
    assert len(colors) == 6
    for color in colors:
        light, dark = sorted([luminance(color), luminance(card)], reverse=True)
        # WCAG 2.1, 1.4.11: graphics need 3 : 1.
        assert (light + 0.05) / (dark + 0.05) >= 3, color
    labs = [seen(color, BLINDNESS[eye]) for color in colors]
    distances = {
        (colors[i], colors[j]): sum((a - b) ** 2 for a, b in zip(labs[i], labs[j])) ** 0.5
        for i in range(6)
        for j in range(i)
    }
    # 10 is several times what is just noticeable side by side (2.3).
    assert min(distances.values()) >= 10, min(distances, key=distances.get)


def test_mistakes_are_one_line_and_exit_2(runs, tmp_path):
    def run(*arguments: object) -> tuple[int, str]:
        command = [sys.executable, "-m", "vapo_megatron", "report", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=HERE)
        assert done.stderr.count("\n") == (done.returncode != 0) and "Traceback" not in done.stderr
        return done.returncode, done.stderr or done.stdout.strip()

    by_arm = (*runs[:2], "--by-arm", "--output", tmp_path / "x.html")
    assert run(*by_arm) == (0, str(tmp_path / "x.html"))
    for arguments, message in (
        ((runs[0], tmp_path), "is not a run directory"),
        ((runs[0], runs[1], runs[0]), "is given twice"),
        ((runs[0], "--output", "x.html"), "--output is for a comparison"),
        ((runs[0], "--by-arm"), "--by-arm is for a comparison"),
        ((runs[0], "--nonsense"), "unrecognized arguments: --nonsense; --help"),
        ((*runs[:2], "--output", tmp_path / "no" / "x.html"), "No such file"),
    ):
        code, said = run(*arguments)
        assert code == 2 and message in said
    with pytest.raises(DataError, match="two or more runs, found 1"):
        build_comparison(runs[:1])


def test_a_table_s_names_may_be_broken_but_not_their_numbers():
    text = table(["a_b/c", "to 0.5"], [("x.y", ["<b>1</b>"])])
    assert '<th scope="col">a_<wbr>b/<wbr>c</th><th scope="col">to 0.5</th>' in text
    assert '<th scope="row">x.<wbr>y</th><td><b>1</b></td>' in text and table(["a"], []) == ""


def test_default_configurations_differ_in_nothing(tmp_path):
    config = tmp_path / "config_in.yaml"
    config.write_text("model: {hf_path: x}")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(load_config(config).to_yaml())
    page = build_comparison([tmp_path / "a", tmp_path / "b"]).read_text()
    assert "No field differs." in page and Page(page).data["charts"] == []
