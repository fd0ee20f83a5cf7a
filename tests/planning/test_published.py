"""The plan against published jobs: docs/planning.md's table, its commands and the stated error."""

import math
import re
from pathlib import Path

import pytest

from tests.planning import published
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.plan import PUBLISHED_OVER_PREDICTED

PAGE = (Path(__file__).resolve().parents[2] / "docs/planning.md").read_text()


@pytest.fixture(scope="module")
def rows():
    return published.rows()


def test_the_page_has_the_table(rows):
    assert published.table(rows) in PAGE, "python -m tests.planning.published prints it"


def test_the_page_has_the_commands():
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.replace("\\\n", " "), re.M | re.S)
    commands = [" ".join(line.split()) for block in blocks for line in block.splitlines()]
    jobs = (*published.JOBS, *published.MIXTURES)
    described = [f"vapo plan {job.options}" for job in jobs]
    assert [command for command in commands if command in described] == described


def test_the_error_is_the_spread_of_the_ratios(rows):
    """Rounded outwards to hundredths."""
    ratios = [row.ratio for row in rows if row.counts]
    least, most = math.floor(100 / max(ratios)) / 100, math.ceil(100 / min(ratios)) / 100
    assert (least, most) == PUBLISHED_OVER_PREDICTED
    assert f"{least} to {most} times its prediction" in PAGE


def test_mixtures_of_experts_are_within_it():
    rows = published.rows(published.MIXTURES)
    assert published.table(rows) in PAGE, "python -m tests.planning.published prints it"
    least, most = PUBLISHED_OVER_PREDICTED
    assert all(least < 1 / row.ratio < most for row in rows)


def test_one_set_of_efficiencies_for_all_jobs():
    """No job may have a share of its own, and the table's are the planner's defaults."""
    defaults = Cluster(num_gpus=1)
    shares = [name for name in vars(defaults) if name.endswith("_share")]
    assert len(shares) == 7
    for job in published.JOBS:
        cluster = published.planned(job)[1].cluster
        for name in [*shares, "collective_seconds", "decode_step_seconds", "layer_host_seconds"]:
            assert getattr(cluster, name) == getattr(defaults, name), (job.name, name)


def test_what_does_not_count_was_set_by_its_own_figure(rows):
    (row,) = [row for row in rows if not row.counts]
    assert row.job.name.startswith("verl") and row.figure == published.STEP
    assert row.ratio == pytest.approx(1, abs=0.005)


def test_steps_and_tokens_agree(rows):
    """Both are published: their ratios differ only if the planned tokens are not the job's."""
    by_job = {}
    for row in rows:
        by_job.setdefault(row.job.name, {})[row.figure] = row.ratio
    both = [figures for figures in by_job.values() if published.TOKENS in figures]
    assert len(both) == 5
    for figures in both:
        assert figures[published.TOKENS] == pytest.approx(figures[published.STEP], rel=0.015)


def test_one_step_off_by_hand():
    """32 GPUs train, longer than 32 generate; 64 GPUs have the tokens of a step."""
    shape, plan = published.planned(published.JOBS[1])
    seconds = plan.seconds
    assert plan.cluster.num_gpus == 64 and plan.config.parallel.world_size == 32
    assert seconds["generation"] < 115
    step = plan.training.seconds + seconds["sync"]
    assert plan.training.seconds - seconds["logprobs"] - seconds["actor_update"] < 3
    assert published.predicted(shape, plan, published.STEP) == pytest.approx(step)
    tokens = published.predicted(shape, plan, published.TOKENS)
    assert tokens == pytest.approx(2048 * 3356 / step / 64, rel=1e-3)
