"""report.html: one self-contained page about a run, finished or not.

Numbers are JSON that the page's script draws; text (configuration, prompts, responses) is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vapo_megatron.config.metrics import accuracy_name
from vapo_megatron.config.schema import VapoConfig
from vapo_megatron.config.techniques import TECHNIQUES, algorithm_name, settings
from vapo_megatron.run.directory import Run, read_run
from vapo_megatron.run.progress import format_seconds
from vapo_megatron.run.report.breakdown import section
from vapo_megatron.run.report.charts import chart_data
from vapo_megatron.run.report.diagnostics import plots
from vapo_megatron.run.report.html import (
    card,
    escape,
    first_to_last,
    script_json,
    write_page,
    yaml_value,
)
from vapo_megatron.run.report.responses import rollouts
from vapo_megatron.run.report.timeline import lanes

_UNKNOWN = '<p class="empty">config.yaml not found.</p>'


def build_report(run_dir: str | Path) -> Path:
    """Write run_dir/report.html from the run's files so far; see read_run for its errors."""
    run = read_run(run_dir)
    return write_page(run.run_dir / "report.html", "report_run.html", _slots(run))


def _slots(run: Run) -> dict[str, str]:
    responses, tokens = rollouts(run)
    return {
        "kind": escape(f"{algorithm_name(run.config)} run" if run.config else "Run"),
        "title": escape(run.run_dir.resolve().name),
        "subtitle": _subtitle(run),
        "headline": "".join(card(*figure) for figure in _headline(run)),
        "data": script_json({**chart_data(run), "tokens": tokens, "plots": plots(run)}),
        "by_name": section(run.rows),
        "timeline": lanes(run.timeline()),
        "techniques": _techniques(run.config),
        "rollouts": responses,
        "config": _configuration(run.config),
    }


def _subtitle(run: Run) -> str:
    if not run.config:
        return "config.yaml not found"
    model, parallel = run.section("model"), run.section("parallel")
    tp = parallel.get("tensor_model_parallel_size", 1)
    pp = parallel.get("pipeline_model_parallel_size", 1)
    cp = parallel.get("context_parallel_size", 1)
    world = parallel.get("world_size", 1)
    parts = [
        Path(str(model.get("hf_path") or "model")).name,
        model.get("dtype", ""),
        f"{world} process{'es' if world != 1 else ''}",
        f"TP {tp} x " + f"CP {cp} x " * (cp > 1) + f"PP {pp} x DP {world // max(1, tp * cp * pp)}",
        f"seed {run.config.get('seed', 0)}",
    ]
    return " &middot; ".join(escape(part) for part in parts if part)


def _headline(run: Run) -> Iterable[tuple[str, str, str]]:
    """Label, value (HTML) and note of each headline number."""
    rows = run.rows
    evaluated = [(row, name) for row in rows if (name := accuracy_name(row))]
    accuracies = [row[name] for row, name in evaluated if row[name] is not None]
    rewards, losses = (_column(rows, n) for n in ("reward/mean", "evaluation/nll_mean"))
    if accuracies:
        k = evaluated[0][1].removeprefix("evaluation/")
        steps = sorted({evaluated[0][0]["step"], evaluated[-1][0]["step"]})
        when = f"step{'s' if len(steps) > 1 else ''} {' and '.join(map(str, steps))}"
        yield "Accuracy", first_to_last(accuracies, ".3f"), f"{k}, {when}"
    elif rewards:
        yield "Reward", first_to_last(rewards, "+.2f"), "mean, first and last step"
    elif losses:
        yield "Held-out NLL", first_to_last(losses, ".3f"), "per token, first and last evaluation"
    done = rows[-1]["step"] if rows else 0
    algorithm = run.section("algorithm")
    pretraining = algorithm.get("value_pretraining_steps", 0)
    is_stage = algorithm.get("stage") == "value_pretraining"
    total = pretraining + (0 if is_stage else algorithm.get("policy_steps", 0))
    of_total = f"<small> of {total}</small>" if total > done else ""
    note = f"{min(done, pretraining)} value pretraining, {max(0, done - pretraining)} policy"
    yield "Steps", f"{done}{of_total}", note
    lengths = _column(rows, "rollout/response_length_mean")
    if lengths:
        yield "Response length", first_to_last(lengths, ",.0f"), "mean tokens, first and last step"
    seconds = sum(_column(rows, "time/step_seconds"))
    if seconds:
        yield "Time", escape(format_seconds(seconds)), "evaluation and checkpoints included"
    speeds = sorted(_column(rows, "tokens_per_second"))
    if speeds:
        yield "Tokens per second", f"{speeds[len(speeds) // 2]:,.0f}", "median step, all processes"
    memory = _column(rows, "memory/peak_bytes")
    if memory:
        yield "Peak memory", f"{max(memory) / 2**30:.2f} GiB", "summed over processes"


def _column(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _techniques(config: Mapping[str, Any]) -> str:
    """Return the list of the seven techniques: name, fields, whether it is on."""
    if not config:
        return _UNKNOWN
    found = settings(config)
    items = []
    for number, (name, fields, is_on, sentence) in enumerate(TECHNIQUES, 1):
        state = "on" if is_on(found) else "off"
        values = "".join(
            f"<code>{field} = {escape(yaml_value(found[field]))}</code>" for field in fields.split()
        )
        items.append(
            f'<li class="{state}"><div class="head"><b>{number}</b><h3>{name}</h3>'
            f'<span class="state">{state}</span></div><p>{sentence}</p>'
            f'<div class="settings">{values}</div></li>'
        )
    return f'<ol class="techniques">{"".join(items)}</ol>'


def _configuration(config: Mapping[str, Any]) -> str:
    """Return every field by section; those that differ from their default are marked."""
    if not config:
        return _UNKNOWN
    defaults = VapoConfig().model_dump()
    top = {name: value for name, value in config.items() if not isinstance(value, dict)}
    sections = {"run": top} if top else {}
    sections |= {name: value for name, value in config.items() if isinstance(value, dict)}
    blocks = []
    for name, fields in sections.items():
        of_section = defaults if name == "run" else defaults.get(name, {})
        rows = "".join(_field(field, value, of_section) for field, value in fields.items())
        blocks.append(f"<section><h3>{escape(name)}</h3><table>{rows}</table></section>")
    return f'<div class="config">{"".join(blocks)}</div>'


def _field(name: str, value: Any, defaults: Mapping[str, Any]) -> str:
    changed = ""
    if name in defaults and defaults[name] != value:
        changed = f' class="changed" title="default: {escape(yaml_value(defaults[name]))}"'
    return f"<tr{changed}><th>{escape(name)}</th><td>{escape(yaml_value(value))}</td></tr>"
