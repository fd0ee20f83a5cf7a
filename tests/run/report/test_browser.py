"""The report's pages in chromium: what a person sees, clicks and points at (-m browser).

Not exercised: other browsers, and whether the pages are beautiful.
"""

import json
import re

import pytest

from tests import jsonl
from tests.browser import Browser
from tests.run.report.test_page import write_run
from vapo_megatron.run.metrics import MetricsWriter
from vapo_megatron.run.report.comparison import build_comparison
from vapo_megatron.run.report.page import build_report

pytestmark = pytest.mark.browser

PIECES = [
    "</script>", "<script>window.ran=1</script>", "<img src=x onerror=window.ran=2>", "\"'&amp;",
    "</pre><u onclick=window.ran=3>", "\u202ekcab\u202c \u200f\u05d0", "\0\x1b[1m",
    " line\n2" + "x" * 300,
]  # fmt: skip
SEEN = "".join(PIECES[:5]) + (
    "\u27e8U+202E\u27e9kcab\u27e8U+202C\u27e9 \u27e8U+200F\u27e9\u05d0\u2400\u241b[1m line\n2"
    + "x" * 300
)
VALUES = [1.0, -1.0, 0.0, 0.5, -0.25, 0.75, None, 0.125]
STEP, PROBLEM = "#shading label:nth-of-type(1) select", "#shading label:nth-of-type(2) select"
PRE = "section.step:not([hidden]) details.response pre"
TOLD = "document.querySelector('#shading output').innerText"
TITLES = "[...document.querySelectorAll('#plots h3')].map(h => h.textContent)"
READ = (
    "((u, x, y, width, height) => { const { canvas } = u.ctx,"
    " copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d',"
    " { willReadFrequently: true }); copy.drawImage(canvas, 0, 0);"
    " return [...copy.getImageData(x, y, width, height).data]; })"
)
"""A chart's pixels, of a copy: chromium complains of a canvas that is read again and again."""


def hostile(run_dir, step: int, prompts: list[str], has_critic: bool = True) -> None:
    """Make the first two responses of a step's groups dangerous, the second one wrong."""
    file = run_dir / "rollouts" / f"step_{step:06d}.jsonl"
    groups = jsonl.read(file)
    for group, prompt in zip(groups, prompts):
        group["prompt"], group["answer"] = prompt, "".join(PIECES)
        for sample, response in enumerate(group["responses"]):
            pieces = PIECES if sample < 2 else ["ab", "c"]
            n = len(pieces)
            tokens = {"pieces": pieces, "values": VALUES[:n], "advantages": [0.25] * n}
            response |= {"text": "".join(pieces), "num_tokens": n, "status": "correct"}
            response["tokens"] = tokens | {"entropy": [0.5 * i for i in range(n)]}
            if not has_critic:
                del response["tokens"]["values"]
        group["responses"][1] |= {"status": "wrong", "reward": -1.0}
    jsonl.write(file, groups)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    run_dir = write_run(tmp_path_factory.mktemp("runs") / "<u>run", num_steps=20)
    config = run_dir / "config.yaml"
    path = f"critic_checkpoint: /runs/{'a_rather_long_name_' * 5}of_a_run"
    config.write_text(config.read_text().replace("critic_checkpoint: null", path))
    hostile(run_dir, 1, ["first </script> problem", "second problem"])
    hostile(run_dir, 20, ["third problem", "fourth problem"])
    with MetricsWriter(run_dir, tensorboard=False, resume_step=21) as writer:
        for step in range(1, 21):
            writer.write_problems(step, [1, 2, 3 + step], [step % 5, 4, 0], [4] * 3)
        for step in (0, 10, 20):
            writer.write_problems(step, range(2), [0, step // 10], [2] * 2, held_out=True)
    return build_report(run_dir)


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def show(browser):
    """show(file, **window) -> the browser with that page, which must not complain or run text."""

    def opened(file, **window):
        assert browser.complaints() == []
        browser.open(file, **window)
        return browser

    browser.events.clear()
    yield opened
    assert browser.complaints() == []
    assert browser.run("window.ran === undefined && document.images.length === 0")


def chart(title: str) -> str:
    """The chart of that title, as JavaScript."""
    return f"charts.find(u => u.root.ariaLabel.startsWith({json.dumps(title)}))"


def legend(page, title: str) -> str:
    """What stands beside a chart: its title, names and numbers."""
    figure = "[...document.querySelectorAll('figure')].find(f => f.querySelector('h3').textContent"
    told = page.run(f"{figure}.startsWith({json.dumps(title)})).innerText")
    return " ".join(told.split())


def painted(page, title: str, color: str, first: float = 0, last: float = 99, opacity=255) -> int:
    """How many pixels between two steps have a colour of the page's style."""
    red, green, blue = bytes.fromhex(page.run(f"paint('var(--{color})')").strip("# "))
    data = page.run(
        f"(u => {{ const {{ min, max }} = u.scales.x,"
        " at = x => Math.round(u.valToPos(x, 'x', true)),"
        f" from = at(Math.max(min, {first})), to = at(Math.min(max, {last}));"
        f" return {READ}(u, from, 0, to - from, u.ctx.canvas.height); }})({chart(title)})"
    )
    # What is nearly clear has few shades of a colour.
    far = 0 if opacity == 255 else 8
    return sum(
        data[i + 3] == opacity
        and max(abs(data[i] - red), abs(data[i + 1] - green), abs(data[i + 2] - blue)) <= far
        for i in range(0, len(data), 4)
    )


def test_responses_are_chosen_opened_and_pointed_at(show, report, tmp_path):
    page = show(report)

    def prompts():
        return page.run("[...document.querySelectorAll('.prompt')]"
            ".filter(p => p.checkVisibility()).map(p => p.innerText)")  # fmt: skip

    def shades():
        return page.run(f"[...document.querySelector('{PRE}').querySelectorAll('span')]"
            ".map(s => getComputedStyle(s).backgroundColor)")  # fmt: skip

    def open_first():
        page.point("section.step:not([hidden]) details.group summary", click=True)
        page.point("section.step:not([hidden]) details.response:nth-of-type(1) summary", click=True)

    for select, option, seen in (
        (STEP, "1", ["first </script> problem", "second problem"]),
        (PROBLEM, "second problem", ["second problem"]),
        (PROBLEM, "all", ["first </script> problem", "second problem"]),
        (STEP, "20", ["third problem", "fourth problem"]),
    ):
        assert prompts() != seen
        page.choose(select, option)
        assert prompts() == seen
        assert page.run("document.querySelectorAll('details.group[open]').length") == (
            option in ("second problem", "all", "20")
        )
    open_first()
    answer = "section.step:not([hidden]) .inside > pre:nth-of-type(2)"
    for selector in (PRE, answer):
        assert page.run(f"document.querySelector('{selector}').innerText") == SEEN
    # The largest value is 1: .6 of the colour; a half of it .3; zero is clear.
    high, low, *others = (re.findall(r"[\d.]+", shade) for shade in shades())
    assert len(others) == len(PIECES) - 2 and high[:3] != low[:3]
    found = [float(shade[3]) for shade in (high, low, *others[:2])]
    assert found == pytest.approx([0.6, 0.6, 0, 0.3], abs=0.01)
    for i, told in (
        (1, "token 1: value 1, advantage 0.25, entropy 0 nat"),
        (5, "token 5: value -0.25, advantage 0.25, entropy 2 nat"),
        (7, "token 7: value not finite, advantage 0.25, entropy 3 nat"),
    ):
        page.point(f"{PRE} span:nth-of-type({i})")
        assert page.run(TOLD) == told
    page.point("#shading button:nth-of-type(3)", click=True)
    assert len(set(shades())) == 1, "every advantage is the same"
    page.point("#shading button:nth-of-type(1)", click=True)
    assert page.run("document.querySelector('#shading [aria-pressed=true]').innerText") == "text"
    assert shades() == [] and page.run(f"document.querySelector('{PRE}').innerText") == SEEN

    run_dir = write_run(tmp_path / "run", num_steps=1)
    hostile(run_dir, 1, ["problem", "problem"], has_critic=False)
    show(build_report(run_dir))
    open_first()
    page.point(f"{PRE} span:nth-of-type(3)")
    assert page.run(TOLD) == "token 3: advantage 0.25, entropy 1 nat"
    buttons = page.run("[...document.querySelectorAll('#shading button')].map(b => b.innerText)")
    assert buttons == ["text", "advantage", "entropy"]
    plots = page.run(TITLES)
    assert plots and not any("critic" in title for title in plots)


def test_observations_stand_between_the_actions(show, tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=1)
    file = run_dir / "rollouts" / "step_000001.jsonl"
    first, *_ = jsonl.read(file)
    tokens = {"pieces": ["a", "b", "c", "d"], "values": VALUES[:4], "advantages": [0.25] * 4}
    turns = [
        {"action": "ab", "observation": "<u>one</u>", "reward": 0.5, "end": 2},
        # Its end is among the tokens that are not kept.
        {"action": "c...", "observation": "two", "reward": 0.0, "end": 4},
        {"action": "...de", "observation": "", "reward": -1.0, "end": 8},
    ]
    tokens["entropy"] = [0.5] * 4
    first["responses"][0] |= {"num_tokens": 8, "turns": turns, "tokens": tokens}
    jsonl.write(file, [first])
    page = show(build_report(run_dir))
    page.point("section.step:not([hidden]) details.group summary", click=True)
    page.point("section.step:not([hidden]) details.response:nth-of-type(1) summary", click=True)

    def inside():
        return page.run(f"[...document.querySelector('{PRE}').childNodes].map(n => n.textContent)")

    assert inside() == [
        "a", "b", "turn 1, reward +0.5", "<u>one</u>", "4 tokens are not shown", "c", "d",
        "turn 3, reward -1",
    ]  # fmt: skip
    shade = "getComputedStyle(document.querySelector('.observation')).backgroundColor"
    assert page.run(shade) not in ("rgba(0, 0, 0, 0)", page.run(
        f"getComputedStyle(document.querySelector('{PRE}')).backgroundColor"))  # fmt: skip
    page.point("#shading button:nth-of-type(1)", click=True)
    assert inside()[:3] == ["ab", "turn 1, reward +0.5", "<u>one</u>"]


def test_charts_are_pointed_at_zoomed_and_drawn_dark_or_light(show, report):
    page = show(report)
    last = page.run("data.charts[1].series[0].points.at(-1)[1]")
    assert legend(page, "Reward") == f"Reward mean {last:.3g}"
    page.point("#charts figure:nth-of-type(2) .u-over")
    step = int(re.search(r"step (\d+)", legend(page, "Reward"))[1])
    assert 5 < step < 15, "the middle of 20"
    value = page.run(f"data.charts[1].series[0].points.find(p => p[0] === {step})[1]")
    assert f"mean {value:.3g}" in legend(page, "Reward")
    # Every chart by step shows it, and nothing where nothing was measured.
    training = page.run(f"data.charts[0].series[1].points.find(p => p[0] === {step})[1]")
    assert f"held-out, avg@8 training {training:.3g}" in legend(page, "Accuracy")
    seconds = page.run(f"data.phases.series[0].seconds[data.phases.steps.indexOf({step})]")
    assert f"generation {seconds:.3g} s" in legend(page, "Seconds per phase")
    page.run(
        "(u => { const r = u.over.getBoundingClientRect(), event = { pointerType: 'touch',"
        " clientX: r.right - 1, clientY: r.y + 9 }; u.over.dispatchEvent("
        f"new PointerEvent('pointermove', event)); }})({chart('Reward')})"
    )
    page.settle()
    assert "step 20" in legend(page, "Reward") and "step 20" in legend(page, "Entropy"), "touched"
    plots = page.run(TITLES)
    assert len(plots) == 11 and all(title.endswith("?") for title in plots)
    page.point("#plots figure:nth-of-type(8) .u-over")
    assert "step" not in legend(page, "Reward") and f"mean {last:.3g}" in legend(page, "Reward")
    # One problem of three never has a right response; problem 1 has none at every fifth step.
    step = int(re.search(r"\? step (\d+) ", legend(page, plots[7]))[1])
    assert f"none correct {0.333 if step % 5 else 0.667}" in legend(page, plots[7])
    for cell, told, place in (
        ("9) .cells i", "problem 1, step 1: 1 of 4 correct", 8),
        (
            "11) .cells div:nth-of-type(2) i:nth-of-type(3)",
            "problem 1, step 20: 2 of 2 correct",
            10,
        ),
    ):
        page.point(f"#plots figure:nth-of-type({cell}")
        assert told in legend(page, plots[place])

    whole = page.run("charts.map(u => [u.scales.x.min, u.scales.x.max])")
    page.drag("#charts figure:nth-of-type(2) .u-over", 0.25, 0.75)
    by_step = "charts.filter(u => u.cursor.sync.key === 'steps')"
    zoomed = page.run(f"{by_step}.map(u => [u.scales.x.min, u.scales.x.max])")
    assert len(zoomed) > 12 and all(4 < a < 6 and 14 < b < 16 for a, b in zoomed)
    page.drag("#charts figure:nth-of-type(2) .u-over", 0.5, 0.5, clicks=2)
    assert page.run("charts.map(u => [u.scales.x.min, u.scales.x.max])") == whole

    assert painted(page, "Value loss", "critic0") > 100
    assert painted(page, "Value loss", "run0") == 0
    light = page.run("paint('var(--critic0)')")
    page.prefer(dark=True)
    assert page.run("paint('var(--critic0)')") != light
    assert painted(page, "Value loss", "critic0") > 100, "drawn anew"
    assert painted(page, "Response length", "run0") > 100
    page.point("#charts figure:nth-of-type(3) .legend tr:nth-of-type(2) .u-label", click=True)
    after = painted(page, "Response length", "run0"), painted(page, "Response length", "run1")
    assert after[0] == 0 and after[1] > 100, "a name hides its curve"


def test_what_is_not_finite_breaks_the_curve_and_is_marked(show, tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 21):
            row = {"reward/mean": 0.5, "critic/explained_variance": -9.0 if step == 3 else 0.5}
            row |= {"critic/grad_norm": 0.0 if step > 10 else 0.5}
            if step % 4 == 0:
                row |= {"critic/loss": 0.5 if step != 12 else float("nan")}
            writer.write(step, row)
    page = show(build_report(tmp_path))
    for first, last, color in ((8, 12, "wrong"), (12, 16, "wrong"), (4, 8, "critic0")):
        assert painted(page, "Value loss", color, first, last) > 0
    assert painted(page, "Value loss", "critic0", 9, 15) == 0, "from 8 to 16"
    assert "below -1 cut off" in legend(page, "Explained variance")
    assert "cut off" not in legend(page, "Reward")
    assert page.run(f"{chart('Explained variance')}.scales.y.min") == -1
    # Zero has no logarithm: it lies on the lower edge.
    assert painted(page, "Gradient norm", "critic0", 12, 18) > 20
    u = chart("Value loss")
    page.run(f"{u}.setCursor({{ left: {u}.valToPos(12, 'x'), top: 9 }})")
    page.settle()
    assert legend(page, "Value loss") == "Value loss step 12 critic not finite"


def test_arms_are_picked(show, tmp_path):
    runs = [
        write_run(tmp_path / arm / f"seed_{s}", 6, pretraining=0) for arm in "ab" for s in range(2)
    ]
    for metrics in tmp_path.glob("b/*/metrics.jsonl"):
        rows = jsonl.read(metrics)
        for row in rows[1:]:
            row["reward/mean"] += 0.1 if "seed_0" in str(metrics) else 0.5
        jsonl.write(metrics, rows)
    page = show(build_comparison(runs, by_arm=True))
    page.point("h1")

    def counts(**options) -> list[int]:
        return [painted(page, "Reward", f"series{arm}", **options) for arm in (0, 1)]

    both, bands = counts(), counts(opacity=0x22)
    assert min(both) > 20 and bands[0] < 10 < 100 < bands[1], "the runs of a are alike"
    assert all(f" {arm} " in legend(page, "Reward") for arm in "ab")
    for _ in ("the other is hidden", "the other turns pale"):
        page.point("#arms button:nth-of-type(2)", click=True)
        assert counts()[0] == 0 and counts()[1] > 20
        is_shown = page.run("charts.every(u => u.series.every((s, i) => !i || s.show))")
        assert is_shown == (" a " in legend(page, "Reward")) == (_ == "the other turns pale")
    page.point("h1")
    assert counts() == both
    page.point("#charts figure:nth-of-type(3) .legend tr:last-of-type .u-label", click=True)
    assert counts(opacity=0x22)[1] < 10, "the band goes with its curve"
    assert counts()[1] == 0


@pytest.mark.parametrize("width", [360, 800, 1400])
def test_nothing_is_wider_than_the_window(show, report, tmp_path, width):
    runs = [tmp_path / f"a_rather_long_name_of_an_arm_{i}" / "seed_0" for i in range(12)]
    for run in runs:
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    for file in (report, build_comparison(runs)):
        page = show(file, width=width)
        page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        page.settle()
        assert page.run("document.documentElement.scrollWidth") <= width
        texts = "[...document.querySelectorAll('pre')].filter(p => p.checkVisibility())"
        assert page.run(f"{texts}.every(p => p.scrollWidth <= p.clientWidth)"), "lines wrap"
        outside = page.run("[...document.querySelectorAll('.settings code')].filter(c =>"
            " c.getBoundingClientRect().right > c.closest('li').getBoundingClientRect().right)"
            ".map(c => c.textContent)")  # fmt: skip
        assert outside == [], "settings stay in their cards"
        page.run("document.querySelector('main').style.width = '340px'")
        page.settle()
        assert page.run(
            "charts.every(u => u.width < 340 && u.width === u.root.parentNode.clientWidth)"
        ), "charts follow the width"
        edges = page.run("charts.map(u => { const { width, height } = u.ctx.canvas;"
            f" const side = (...area) => {READ}(u, ...area).some(v => v);"
            " return [side(0, 0, 1, height), side(width - 1, 0, 1, height),"
            " side(0, 0, width, 1), side(0, height - 1, width, 1)]; })")  # fmt: skip
        assert edges and not any(map(any, edges)), "no label is cut off"
