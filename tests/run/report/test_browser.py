"""The report's pages in chromium: what a person sees, clicks and points at (-m browser).

Not exercised: other browsers, and whether the pages are beautiful.
"""

import json
import re

import pytest

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


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


def hostile(run_dir, step: int, prompts: list[str], has_critic: bool = True) -> None:
    """Make the first two responses of a step's groups dangerous, the second one wrong."""
    file = run_dir / "rollouts" / f"step_{step:06d}.jsonl"
    groups = [json.loads(line) for line in file.read_text().splitlines()]
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
    file.write_text("".join(json.dumps(group) + "\n" for group in groups))


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


@pytest.fixture
def page(browser, report):
    browser.open(report)
    yield browser
    assert browser.complaints() == []
    assert browser.run("window.ran === undefined && document.images.length === 0")


def shown_prompts(page) -> list[str]:
    return page.run(
        "[...document.querySelectorAll('.prompt')].filter(p => p.checkVisibility())"
        ".map(p => p.innerText)"
    )


def open_first(page, responses: int = 1) -> None:
    """Open what stands first in the step that is shown, by clicks."""
    page.point("section.step:not([hidden]) details.group summary", click=True)
    for n in range(1, responses + 1):
        page.point(f"section.step:not([hidden]) details.response:nth-of-type({n}) summary", True)


PRE = "section.step:not([hidden]) details.response pre"


def test_step_and_problem_choose_what_is_shown(page):
    assert shown_prompts(page) == ["third problem", "fourth problem"]
    page.choose("#shading label:nth-of-type(1) select", "1")
    assert shown_prompts(page) == ["first </script> problem", "second problem"]
    page.choose("#shading label:nth-of-type(2) select", "second problem")
    assert shown_prompts(page) == ["second problem"]
    assert page.run("document.querySelectorAll('details.group[open]').length") == 1
    seen = page.run("document.querySelectorAll('.response summary')[16].checkVisibility()")
    assert seen, "its responses can be opened"
    page.choose("#shading label:nth-of-type(2) select", "all")
    assert len(shown_prompts(page)) == 2
    page.choose("#shading label:nth-of-type(1) select", "20")
    assert shown_prompts(page) == ["third problem", "fourth problem"]


def test_text_is_shown_as_it_is(page):
    open_first(page, responses=2)
    assert page.run(f"document.querySelector('{PRE}').innerText") == SEEN
    spans = page.run(f"[...document.querySelectorAll('{PRE}')][0].querySelectorAll('span').length")
    assert spans == len(PIECES)
    answer = "section.step:not([hidden]) .inside > pre:nth-of-type(2)"
    assert page.run(f"document.querySelector('{answer}').innerText") == SEEN
    page.point("#shading button:nth-of-type(1)", click=True)
    assert page.run("document.querySelector('#shading [aria-pressed=true]').innerText") == "text"
    assert page.run(f"document.querySelector('{PRE}').innerHTML.includes('<span')") is False
    assert page.run(f"document.querySelector('{PRE}').innerText") == SEEN
    # Without the page's script the text is the same.
    assert page.run("document.querySelectorAll('script').length") == 2


def test_pointing_at_a_token_shows_its_numbers(page):
    open_first(page)
    for i, told in (
        (1, "token 1: value 1, advantage 0.25, entropy 0 nat"),
        (5, "token 5: value -0.25, advantage 0.25, entropy 2 nat"),
        (7, "token 7: value not finite, advantage 0.25, entropy 3 nat"),
    ):
        page.point(f"{PRE} span:nth-of-type({i})")
        assert page.run("document.querySelector('#shading output').innerText") == told
        assert page.run(f"document.querySelector('{PRE} span:nth-of-type({i})').title") == told


def test_a_run_without_a_critic(browser, tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=1)
    hostile(run_dir, 1, ["problem", "problem"], has_critic=False)
    browser.open(build_report(run_dir))
    open_first(browser)
    browser.point(f"{PRE} span:nth-of-type(3)")
    told = browser.run("document.querySelector('#shading output').innerText")
    assert told == "token 3: advantage 0.25, entropy 1 nat"
    buttons = browser.run("[...document.querySelectorAll('#shading button')].map(b => b.innerText)")
    assert buttons == ["text", "advantage", "entropy"]
    plots = browser.run("[...document.querySelectorAll('#plots h3')].map(h => h.textContent)")
    assert plots and not any("critic" in title for title in plots)
    assert browser.complaints() == []


def test_shades_follow_the_numbers(page):
    open_first(page)

    def shades() -> list[str]:
        return page.run(
            f"[...document.querySelector('{PRE}').querySelectorAll('span')]"
            ".map(s => getComputedStyle(s).backgroundColor)"
        )

    def strength(shade: str) -> float:
        return float(shade.rstrip(")").split(",")[3])

    values = shades()
    assert values[0].rsplit(",", 1)[0] != values[1].rsplit(",", 1)[0], "high and low differ"
    # The largest is 1: .6 of the colour; a half of it .3; zero is clear.
    assert strength(values[0]) == strength(values[1]) == pytest.approx(0.6, abs=0.01)
    assert strength(values[3]) == pytest.approx(0.3, abs=0.01) and strength(values[2]) == 0
    page.point("#shading button:nth-of-type(3)", click=True)
    assert len(set(shades())) == 1, "every advantage is the same"


def chart(title: str) -> str:
    """The chart of that title, as JavaScript."""
    return f"charts.find(u => u.root.ariaLabel.startsWith({json.dumps(title)}))"


def legend(page, title: str) -> str:
    """What stands beside a chart: its title, names and numbers."""
    figure = "[...document.querySelectorAll('figure')].find(f => f.querySelector('h3').textContent"
    told = page.run(f"{figure}.startsWith({json.dumps(title)})).innerText")
    return " ".join(told.split())


READ = (
    "((u, x, y, width, height) => { const { canvas } = u.ctx,"
    " copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d',"
    " { willReadFrequently: true }); copy.drawImage(canvas, 0, 0);"
    " return [...copy.getImageData(x, y, width, height).data]; })"
)
"""A chart's pixels, of a copy: chromium complains of a canvas that is read again and again."""


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


def test_pointing_at_charts_and_plots_shows_numbers(page):
    last = page.run("data.charts[1].series[0].points.at(-1)[1]")
    assert legend(page, "Reward") == f"Reward mean {last:.3g}"
    page.point("#charts figure:nth-of-type(2) .u-over")
    step = int(re.search(r"step (\d+)", legend(page, "Reward"))[1])
    assert 5 < step < 15, "the middle of 20"
    value = page.run(f"data.charts[1].series[0].points.find(p => p[0] === {step})[1]")
    assert f"mean {value:.3g}" in legend(page, "Reward")
    # Every chart by step shows it, and nothing where nothing was measured.
    assert page.run(f"charts.filter(u => u.cursor.idx !== null)"
        f".every(u => u.data[0][u.cursor.idx] === {step})")  # fmt: skip
    training = page.run(f"data.charts[0].series[1].points.find(p => p[0] === {step})[1]")
    assert f"held-out, avg@8 training {training:.3g}" in legend(page, "Accuracy")
    seconds = page.run(f"data.phases.series[0].seconds[data.phases.steps.indexOf({step})]")
    assert f"generation {seconds:.3g} s" in legend(page, "Seconds per phase")
    u = chart("Reward")
    page.run(
        f"(u => {{ const r = u.over.getBoundingClientRect(), event = {{ pointerType: 'touch',"
        " clientX: r.right - 1, clientY: r.y + 9 }; u.over.dispatchEvent("
        f"new PointerEvent('pointermove', event)); }})({u})"
    )
    page.settle()
    assert "step 20" in legend(page, "Reward") and "step 20" in legend(page, "Entropy"), "touched"
    plots = page.run("[...document.querySelectorAll('#plots h3')].map(h => h.textContent)")
    assert len(plots) == 11 and all(title.endswith("?") for title in plots)
    page.point("#plots figure:nth-of-type(8) .u-over")
    assert "step" not in legend(page, "Reward") and f"mean {last:.3g}" in legend(page, "Reward")
    # One problem of three never has a right response; problem 1 has none at every fifth step.
    told = legend(page, plots[7])
    step = int(re.search(r"\? step (\d+) ", told)[1])
    assert f"none correct {0.333 if step % 5 else 0.667}" in told
    page.point("#plots figure:nth-of-type(9) .cells i")
    assert "problem 1, step 1: 1 of 4 correct" in legend(page, plots[8])
    page.point("#plots figure:nth-of-type(11) .cells div:nth-of-type(2) i:nth-of-type(3)")
    assert "problem 1, step 20: 2 of 2 correct" in legend(page, plots[10])


def test_curves_are_drawn_in_their_colours_dark_or_light(page):
    counts = [painted(page, "Value loss", "critic0"), painted(page, "Value loss", "run0")]
    assert counts[0] > 100 and counts[1] == 0
    light = page.run("paint('var(--critic0)')")
    page.prefer(dark=True)
    assert page.run("paint('var(--critic0)')") != light
    assert painted(page, "Value loss", "critic0") > 100, "drawn anew"


def test_a_drag_zooms_all_charts_and_a_name_hides_its_curve(page):
    whole = page.run("charts.map(u => [u.scales.x.min, u.scales.x.max])")
    page.drag("#charts figure:nth-of-type(2) .u-over", 0.25, 0.75)
    by_step = "charts.filter(u => u.cursor.sync.key === 'steps')"
    zoomed = page.run(f"{by_step}.map(u => [u.scales.x.min, u.scales.x.max])")
    assert len(zoomed) > 12 and {(round(a), round(b)) for a, b in zoomed[:10]} == {(5, 15)}
    assert all(4 < a < 6 and 14 < b < 16 for a, b in zoomed), "the bars' edges too"
    page.drag("#charts figure:nth-of-type(2) .u-over", 0.5, 0.5, clicks=2)
    assert page.run("charts.map(u => [u.scales.x.min, u.scales.x.max])") == whole
    before = painted(page, "Response length", "run0"), painted(page, "Response length", "run1")
    page.point("#charts figure:nth-of-type(3) .legend tr:nth-of-type(2) .u-label", click=True)
    after = painted(page, "Response length", "run0"), painted(page, "Response length", "run1")
    assert before[0] > 100 and after[0] == 0 and after[1] > 100


def test_what_is_not_finite_breaks_the_curve_and_is_marked(browser, tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 21):
            row = {"reward/mean": 0.5, "critic/explained_variance": -9.0 if step == 3 else 0.5}
            row |= {"critic/grad_norm": 0.0 if step > 10 else 0.5}
            if step % 4 == 0:
                row |= {"critic/loss": 0.5 if step != 12 else float("nan")}
            writer.write(step, row)
    browser.open(build_report(tmp_path))
    for first, last, color in ((8, 12, "wrong"), (12, 16, "wrong"), (4, 8, "critic0")):
        assert painted(browser, "Value loss", color, first, last) > 0
    assert painted(browser, "Value loss", "critic0", 9, 15) == 0, "from 8 to 16"
    assert painted(browser, "Reward", "run0", 9, 15) > 100
    assert "below -1 cut off" in legend(browser, "Explained variance")
    assert "cut off" not in legend(browser, "Reward")
    low = browser.run(f"{chart('Explained variance')}.scales.y.min")
    assert low == -1
    # Zero has no logarithm: it lies on the lower edge.
    assert painted(browser, "Gradient norm", "critic0", 12, 18) > 20
    u = chart("Value loss")
    browser.run(f"{u}.setCursor({{ left: {u}.valToPos(12, 'x'), top: 9 }})")
    browser.settle()
    assert legend(browser, "Value loss") == "Value loss step 12 critic not finite"
    assert browser.complaints() == []


def test_arms_are_picked(browser, tmp_path):
    runs = [
        write_run(tmp_path / arm / f"seed_{s}", 6, pretraining=0) for arm in "ab" for s in range(2)
    ]
    for metrics in tmp_path.glob("b/*/metrics.jsonl"):
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        for row in rows[1:]:
            row["reward/mean"] += 0.1 if "seed_0" in str(metrics) else 0.5
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    browser.open(build_comparison(runs, by_arm=True))
    browser.point("h1")

    def counts() -> list[int]:
        return [painted(browser, "Reward", f"series{arm}") for arm in (0, 1)]

    both = counts()
    assert min(both) > 20
    bands = [painted(browser, "Reward", f"series{arm}", opacity=0x22) for arm in (0, 1)]
    assert bands[0] < 10 < 100 < bands[1], "the runs of a are alike"
    assert all(f" {arm} " in legend(browser, "Reward") for arm in "ab")
    browser.point("#arms button:nth-of-type(2)", click=True)
    assert counts()[0] == 0 and counts()[1] > 20
    assert " a " not in legend(browser, "Reward") and " b " in legend(browser, "Reward")
    assert browser.run(
        "charts.every(u => u.series.every((s, i) => !i || s.show === (s.arm === 1)))"
    )
    browser.point("#arms button:nth-of-type(2)", click=True)
    assert counts()[0] == 0 and counts()[1] > 20, "the other turns pale"
    browser.point("h1")
    assert counts() == both
    browser.point("#charts figure:nth-of-type(3) .legend tr:last-of-type .u-label", click=True)
    assert painted(browser, "Reward", "series1", opacity=0x22) < 10, "the band goes with its curve"
    assert counts()[1] == 0 and browser.complaints() == []


@pytest.mark.parametrize("width", [360, 800, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_window(browser, report, tmp_path, width, dark):
    runs = [tmp_path / f"a_rather_long_name_of_an_arm_{i}" / "seed_0" for i in range(12)]
    for run in runs:
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    for file in (report, build_comparison(runs)):
        browser.open(file, width=width, dark=dark)
        browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        browser.settle()
        assert browser.run("document.documentElement.scrollWidth") <= width
        texts = "[...document.querySelectorAll('pre')].filter(p => p.checkVisibility())"
        assert browser.run(f"{texts}.every(p => p.scrollWidth <= p.clientWidth)"), "lines wrap"
        outside = browser.run("[...document.querySelectorAll('.settings code')].filter(c =>"
            " c.getBoundingClientRect().right > c.closest('li').getBoundingClientRect().right)"
            ".map(c => c.textContent)")  # fmt: skip
        assert outside == [], "settings stay in their cards"
        browser.run("document.querySelector('main').style.width = '340px'")
        browser.settle()
        assert browser.run(
            "charts.every(u => u.width < 340 && u.width === u.root.parentNode.clientWidth)"
        ), "charts follow the width"
        edges = browser.run("charts.map(u => { const { width, height } = u.ctx.canvas;"
            f" const side = (...area) => {READ}(u, ...area).some(v => v);"
            " return [side(0, 0, 1, height), side(width - 1, 0, 1, height),"
            " side(0, 0, width, 1), side(0, height - 1, width, 1)]; })")  # fmt: skip
        assert edges and not any(map(any, edges)), "no label is cut off"
        assert browser.complaints() == []
