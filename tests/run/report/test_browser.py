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
            writer.write_problems(step, [1, 2, 3 + step], [step % 5, 4, 0], 4)
        for step in (0, 10, 20):
            writer.write_problems(step, range(2), [0, step // 10], 2, held_out=True)
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


def test_pointing_at_charts_and_plots_shows_numbers(page):
    def legend(title: str) -> str:
        return page.run(
            f"[...document.querySelectorAll('figure')].find(f => f.querySelector('h3')."
            f"textContent.startsWith({json.dumps(title)})).innerText"
        )

    chart = "#charts figure:nth-of-type(2) svg[role=img]"
    page.point(chart)
    step = page.run(f"document.querySelector('{chart} .hover').textContent").split()[1]
    assert 5 < int(step) < 15, "the middle of 20"
    value = f"data.charts[1].series[0].points.find(p => p[0] === {step})[1]"
    assert page.run(f"format({value})") in legend("Reward")
    plots = page.run("[...document.querySelectorAll('#plots h3')].map(h => h.textContent)")
    assert len(plots) == 11 and all(title.endswith("?") for title in plots)
    page.point("#plots figure:nth-of-type(8) svg[role=img]")
    # One problem of three never has a right response; problem 1 has none at every fifth step.
    step = int(re.search(r"step: (\d+)", legend(plots[7]))[1])
    assert f"none right {0.333 if step % 5 else 0.667}" in " ".join(legend(plots[7]).split())
    page.point("#plots figure:nth-of-type(9) svg rect")
    assert "problem 1, step 1: 1 of 4 right" in legend(plots[8])
    page.point("#plots figure:nth-of-type(11) svg rect:nth-of-type(6)")
    assert "problem 1, step 20: 2 of 2 right" in legend(plots[10])


def test_arms_are_picked(browser, tmp_path):
    runs = [write_run(tmp_path / arm / f"seed_{s}", 6) for arm in "ab" for s in range(2)]
    browser.open(build_comparison(runs, by_arm=True))
    paths = "document.querySelectorAll('#charts figure:nth-of-type(2) g[data-arm=\"{}\"] path')"
    assert [browser.run(f"{paths.format(arm)}.length") for arm in (0, 1)] == [1, 1]
    assert browser.run("document.querySelectorAll('#charts figure .band').length") > 2
    browser.point("#arms button:nth-of-type(2)", click=True)
    assert [browser.run(f"{paths.format(arm)}.length") for arm in (0, 1)] == [0, 1]
    assert browser.run("document.querySelectorAll('.legend span:not([hidden]) .name').length") == (
        browser.run("document.querySelectorAll('#charts figure').length")
    )
    browser.point("#arms button:nth-of-type(2)", click=True)
    assert [browser.run(f"{paths.format(arm)}.length") for arm in (0, 1)] == [1, 1]
    assert browser.run("document.querySelectorAll('.pale').length") > 0, "the others turn pale"
    assert browser.complaints() == []


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
        sides = browser.run("[...document.querySelectorAll('svg text')].map(t => {"
            " const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();"
            " return Math.max(b.left - a.left, a.right - b.right); })")  # fmt: skip
        assert sides and max(sides) <= 1, "no label is cut off"
        assert browser.complaints() == []
