"""Histograms: bars by hand, values that are all the same, text that is inert.

Not exercised: how a browser draws them.
"""

import re

from vapo_megatron.run.report.histogram import histogram


def bars(figure):
    """(x, y, width, height, colour, what is said) of each."""
    found = re.findall(
        r'<rect x="(.*?)" y="(.*?)" width="(.*?)" height="(.*?)" style="fill:(.*?)">'
        r"<title>(.*?)</title>",
        figure,
    )
    return [(*map(float, bar[:4]), *bar[4:]) for bar in found]


def test_groups_stand_on_each_other():
    groups = [("kept", [0.0, 0.1, 0.5]), ("left out", [0.2, 1.0, 1.0, 0.95])]
    figure = histogram("Rate", groups, bins=2, low=0, high=1)
    # 0 to .5 has 2 and 1, .5 to 1 has 1 and 3: of 150 pixels the highest bar takes all.
    blue, faint = "var(--series0)", "var(--faint)"
    assert bars(figure) == [
        (9.6, 75.0, 140.8, 75.0, blue, "kept: 2 (0 to 0.5)"),
        (9.6, 37.5, 140.8, 37.5, faint, "left out: 1 (0 to 0.5)"),
        (169.6, 112.5, 140.8, 37.5, blue, "kept: 1 (0.5 to 1)"),
        (169.6, 0.0, 140.8, 112.5, faint, "left out: 3 (0.5 to 1)"),
    ]
    assert "most in a bar: 4" in figure and "kept 3" in figure and "left out 4" in figure
    assert re.findall(r"<text .*?>(.*?)</text>", figure) == ["0", "0.5", "1"]


def test_the_axis_ends_at_the_values_and_may_be_a_point():
    assert [bar[5] for bar in bars(histogram("x", [("a", [10, 20, 30])], bins=2))] == [
        "a: 1 (10 to 20)", "a: 2 (20 to 30)"
    ]  # fmt: skip
    (one,) = bars(histogram("x", [("a", [7.0, 7.0]), ("b", [])], bins=20))
    assert one[3] == 150 and one[5] == "a: 2 (7 to 7)"


def test_text_is_escaped():
    figure = histogram("<b>&", [("<i>", [1.0])], bins=1)
    assert "<b>" not in figure and "&lt;b&gt;&amp;" in figure and "&lt;i&gt;" in figure
