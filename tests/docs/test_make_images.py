"""docs/make_images.py: the learning curve is of the run's numbers, where the axes have them.

Not exercised: chromium, which makes the other picture.
"""

import xml.etree.ElementTree as ET

from docs import make_images

ROWS = [
    {"step": 0, "evaluation/avg@8": 0.25, "evaluation/response_length_mean": 20.0},
    {"step": 1, "reward/correct_fraction": 0.5, "rollout/response_length_mean": 40.0},
    {"step": 2, "reward/correct_fraction": None, "rollout/response_length_mean": 60.0},
    {
        "step": 4, "reward/correct_fraction": 1.0, "rollout/response_length_mean": 99.0,
        "evaluation/avg@8": 0.75, "evaluation/response_length_mean": 50.0,
    },
]  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


def points(line):
    return [tuple(map(float, point.split(","))) for point in line.get("points").split()]


def test_a_curve_by_hand():
    picture = ET.fromstring(make_images.learning_curve(ROWS, pretraining=1))
    accuracy, length = map(points, picture.iter(f"{SVG}polyline"))
    # Axes of 340 x 190 pixels from (50, 60) on; 4 steps: 85 pixels each, 1.0 at the top; a row
    # that was not finite has no point.
    assert accuracy == [(135.0, 155.0), (390.0, 60.0)]
    # The second from x = 470 on, to 100 tokens: 250 - 190 * (.4, .6, .99).
    assert length == [(555.0, 174.0), (640.0, 136.0), (810.0, 61.9)]
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in picture.iter(f"{SVG}circle")]
    # The first is the legend's. 250 - 190 * (.25, .75), and of 100 tokens 20 and 50.
    assert dots[1:] == [(50.0, 202.5), (390.0, 107.5), (470.0, 212.0), (810.0, 155.0)]
    shaded = [r.get("width") for r in picture.iter(f"{SVG}rect") if r.get("class") == "shade"]
    assert shaded == ["24", "85.0", "85.0"]
    assert "held-out problems, avg@8" in "".join(picture.itertext())


def test_ticks():
    for last, tick in [(1, 1), (6, 1), (7, 2), (44, 10), (313, 100)]:
        assert make_images._tick(last) == tick, (last, tick)


def test_a_run_without_chromium_has_its_curve(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("algorithm: {value_pretraining_steps: 2}\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "rollout/response_length_mean": 3.0}\n')
    monkeypatch.setattr(make_images.shutil, "which", lambda _: None)
    assert make_images.main([str(run), "--out", str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["learning_curve.svg"]
    assert "no chromium" in capsys.readouterr().err
