"""Which curves the report shows, and their points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vapo_megatron.config.metrics import accuracy_name, describe
from vapo_megatron.config.phases import PHASES, TIMED
from vapo_megatron.run.directory import Run
from vapo_megatron.run.report.breakdown import charts_by_name
from vapo_megatron.run.report.comparison import look

_Series = tuple[tuple[str, str], ...]

_CHARTS: tuple[tuple[str, _Series, dict[str, Any]], ...] = (
    ("Accuracy", (
        ("evaluation/avg@K", "held-out, {K}"), ("reward/correct_fraction", "training"),
        ("rollout/sampled_correct_fraction", "all sampled"),
    ), {"low": 0, "high": 1}),
    ("Reward", (("reward/mean", "mean"),), {}),
    ("Spread of the reward", (
        ("reward/std", "all"), ("reward/group_std_mean", "within groups"),
        ("reward/equal_groups_fraction", "groups without"),
    ), {"low": 0}),
    ("Response length", (
        ("rollout/response_length_mean", "mean"), ("rollout/response_length_max", "longest"),
    ), {"low": 0}),
    ("Turns of an episode", (("rollout/turns_mean", "mean"),), {"low": 0}),
    ("Observations of an episode", (("rollout/observation_tokens_mean", "mean"),), {"low": 0}),
    ("Reward of a turn", (("rollout/turn_reward_mean", "mean"),), {}),
    ("Wrong calls of an episode", (("rollout/failed_calls_mean", "mean"),), {"low": 0}),
    ("Episodes that do not end by themselves", (
        ("rollout/cut_by_turns_fraction", "cut by max_turns"),
        ("rollout/cut_by_action_fraction", "by max_action_tokens"),
        ("rollout/environment_failed_fraction", "failed"),
    ), {"low": 0}),
    ("Waiting for the environment", (
        ("time/environment_seconds", "an episode's calls"),
        ("time/environment_waiting_seconds", "an engine, idle"),
    ), {"low": 0}),
    ("Entropy", (("actor/entropy", "policy"),), {"low": 0}),
    ("Explained variance", (("critic/explained_variance", "critic"),), {"high": 1, "floor": -1}),
    ("Value loss", (("critic/loss", "critic"),), {"low": 0}),
    ("Sampler-trainer difference", (
        ("rollout/logprob_diff_mean", "mean"), ("rollout/logprob_diff_max", "max"),
    ), {"log": True}),
    ("Clip fractions", (
        ("actor/clip_fraction_low", "low"), ("actor/clip_fraction_high", "high"),
    ), {"low": 0}),
    ("Gradient norm", (
        ("actor/grad_norm", "actor"), ("critic/grad_norm", "critic"),
    ), {"log": True}),
    ("Lambda of the actor", (("algorithm/lambda_actor_mean", "mean"),), {"high": 1}),
    ("Positive-example LM loss", (
        ("actor/positive_lm_loss", "NLL"), ("evaluation/nll_mean", "held-out"),
    ), {"low": 0}),
    ("Tokens per second", (("tokens_per_second", "all processes"),), {"low": 0}),
)  # fmt: skip
"""Title, (metric, label) of each curve, and the axis: shows low and high, nothing below floor."""

_MAX_BARS = 160


def chart_data(run: Run) -> dict[str, Any]:
    """Return what the page's script draws: a point is [step, value or null]."""
    rows = run.rows
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    phases = [p for p in TIMED if f"time/{p}_seconds" in names]
    by_name = charts_by_name(names)
    every = [*_CHARTS, *(chart for chart, _ in by_name)]
    charted = {name for chart in every for name, _ in chart[1]}
    charted |= {"time/step_seconds"} | {f"time/{p}_seconds" for p in phases}
    others = [n for n in names if n not in charted and describe(n) and not accuracy_name({n: 0})]
    charts = [_chart(*chart, rows) for chart in _CHARTS]
    charts += [_distinct(_chart(*chart, rows), labels) for chart, labels in by_name]
    more = [_chart(name, ((name, ""),), {}, rows) for name in others]
    return {
        "pretraining": run.section("algorithm").get("value_pretraining_steps", 0),
        "charts": [chart for chart in charts if chart["series"]],
        "more": [chart for chart in more if chart["series"]],
        "steps": [row["step"] for row in rows],
        "phases": _phases(phases, rows) if phases else None,
    }


def _distinct(chart: dict[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """Give the curve of each label a colour and dashes of its own, the same in every chart."""
    series = [{**curve, **look(labels.index(curve["label"]))} for curve in chart["series"]]
    return {**chart, "series": series}


def _phases(phases: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the phases' seconds as bars; with many steps, each is the mean of several."""
    per = -(-len(rows) // _MAX_BARS)
    groups = [rows[i : i + per] for i in range(0, len(rows), per)]

    def seconds(phase: str, some: Iterable[Mapping[str, Any]]) -> float:
        return sum(row.get(f"time/{phase}_seconds") or 0.0 for row in some)

    total = sum(seconds(p, rows) for p in phases) or 1.0
    shares = {p: seconds(p, rows) / total for p in phases}
    return {
        "title": "Seconds per phase" + (f", mean of {per} steps" if per > 1 else ""),
        "steps": [sum(row["step"] for row in group) / len(group) for group in groups],
        "room": per / 2,
        "series": [
            {
                "label": p.replace("_", " "),
                "about": PHASES[p].sentence,
                "share": f"{share:.{1 if share < 0.1 else 0}%}".replace("%", " %"),
                "seconds": [seconds(p, group) / len(group) for group in groups],
            }
            for p, share in shares.items()
        ],
    }


def _chart(
    title: str, series: _Series, axis: dict[str, Any], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a chart with each metric's points and description, and their unit."""
    filled, units = [], []
    for name, label in series:
        if name == "evaluation/avg@K":
            name = next((n for row in rows if (n := accuracy_name(row))), name)
            label = label.replace("{K}", name.removeprefix("evaluation/"))
        points = [[row["step"], row[name]] for row in rows if name in row]
        if points:
            metric = describe(name)
            assert metric, f"{name} is in config/metrics.py"
            unit = metric.unit
            if unit == "bytes":
                points = [[step, value and value / 2**30] for step, value in points]
                unit = "GiB"
            units.append(unit)
            role = name.split("/")[0] if name.startswith(("actor/", "critic/")) else "run"
            about = metric.description
            filled.append({"label": label, "role": role, "points": points, "about": about})
    return {"title": title, "series": filled, **axis, "unit": units[0] if units else ""}
