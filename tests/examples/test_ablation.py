"""The ablation's arms, its table, and what it refuses. Its runner:
tests/examples/test_runner.py.

Not exercised but by the slow test: training itself. Whether an arm shows what the paper found is
for examples/run_ablation_tiny.sh to say.
"""

import json
import os
import re
import shutil
import subprocess

import pytest

from tests.examples.test_recipes import CHANGES
from tests.examples.tiny import ROOT, done, leave, start
from vapo_megatron.config import AlgorithmConfig
from vapo_megatron.errors import UserError

# isort: split
from ablation import main as ablation
from ablation.main import TABLES, arms_by_name
from runner import command
from runner.arms import seed_jobs


def row(step, accuracy=None, length=90.0):
    found = {"step": step, "actor/entropy": 0.1 * step}
    if accuracy is not None:
        found |= {"evaluation/avg@4": accuracy, "evaluation/response_length_mean": length}
    return found


def test_a_run_in_numbers():
    rows = [row(0, 0.1), row(1), row(2, 0.2), row(3), row(4, 0.8, 70.0), row(6, 0.8, 60.0)]

    def cells(rows):
        return {name: cell({"vapo": {0: rows}}, "vapo") for name, cell in ablation.COLUMNS.items()}

    assert cells(rows) == {
        "final accuracy": "0.800", "each seed": "0.800", "against vapo": "",
        "best accuracy": "0.800", "at step": "4", "response length": "60", "entropy": "0.600",
        # .5 is halfway from .2 at step 2 to .8 at step 4.
        "steps to 0.5": "3.0", "responses per second": "-",
    }  # fmt: skip
    speeds = [
        {**r, "tokens_per_second": 100.0 * n, "rollout/response_length_mean": 20.0}
        for n, r in enumerate(rows)
    ]
    # 5, 10, ... 25; the first row has none.
    assert ablation.responses_per_second(speeds) == 15.0
    assert cells(rows[:3])["steps to 0.5"] == "never"
    assert cells([row(0, 0.7), row(2, 0.9)])["steps to 0.5"] == "0.0"
    # What is reached and lost again was reached, at its best.
    lost = cells([row(0, 0.1), row(5, 0.5), row(10, 0.2)])
    assert (lost["best accuracy"], lost["at step"], lost["final accuracy"]) == (
        "0.500",
        "5",
        "0.200",
    )
    assert (lost["each seed"], lost["steps to 0.5"]) == ("0.200", "5.0")


NO_VALUES, NO_CRITIC = {"model.critic_checkpoint": None}, {"model.critic_hf_path": None}


def of_recipe(name):
    """What a recipe says of the algorithm, but for the values' pretraining, which is the arms'."""
    fields = AlgorithmConfig.model_fields.keys() - {"value_pretraining_steps"}
    return {f"algorithm.{field}": v for field, v in CHANGES[name].items() if field in fields}


CHANGED = {
    "ppo": {**NO_VALUES, **of_recipe("ppo")},
    "no_value_pretraining": NO_VALUES,
    "no_decoupled_gae": {"algorithm.lambda_critic": "same_as_actor"},
    "no_decoupled_gae_95": {"algorithm.lambda_critic": 0.95, "algorithm.lambda_actor": 0.95},
    "no_length_adaptive": {"algorithm.lambda_actor": 0.95},
    "no_clip_higher": {"algorithm.clip_high": 0.2},
    "no_token_level": {"algorithm.loss_aggregation": "sample"},
    "no_positive_lm": {"algorithm.positive_lm_coef": 0.0},
    "no_group_sampling": {"algorithm.group_size": 1},
    "grpo": {**NO_VALUES, **NO_CRITIC, **of_recipe("grpo")},
    "dapo": {**NO_VALUES, **NO_CRITIC, **of_recipe("dapo")},
    "sao": {"model.critic_checkpoint_optimizer": False, **of_recipe("sao")},
    "bpco": {
        **NO_VALUES, **NO_CRITIC, "algorithm.value_pretraining_steps": 6, **of_recipe("bpco")
    },
}  # fmt: skip
WITH_LM = {"algorithm.positive_lm_coef": 0.1}
CHANGED_KEYS = {
    "oracle": {},
    "dapo_lm": {**CHANGED["dapo"], **WITH_LM},
    "grpo_lm": {**CHANGED["grpo"], **WITH_LM},
    "dapo_no_dynamic": {**CHANGED["dapo"], "algorithm.dynamic_sampling": False},
    "no_values_no_decoupled_gae": {
        **CHANGED["no_value_pretraining"],
        **CHANGED["no_decoupled_gae"],
    },
}
CORRECTED = {
    "recomputed": {},
    "tis": {"algorithm.sampler_correction": "tis"},
    "dis": {"algorithm.policy_loss": "dis"},
}
CHANGED_LAG = {
    f"{name}_{lag}": {**fields, "rollout.lag": lag}
    for name, fields in CORRECTED.items()
    for lag in (0, 1, 4, 16)
    if fields or lag
}
CHANGED_PLACEMENT = {"carry_over": {"rollout.carry_over_groups": 8}} | {
    f"lag_{lag}": {
        "parallel.world_size": 1,
        "rollout.placement": "disaggregated",
        "rollout.num_processes": 1,
        "rollout.max_num_sequences": 128,
        "rollout.lag": lag,
    }
    for lag in (0, 1, 4)
}
CHANGED_OPTIMIZERS = {
    f"{name}_{who}": {
        **{f"optimizer.{role}_method": method for role in roles},
        "optimizer.matrix_rank_fraction": fraction,
    }
    for name, method, fraction in (
        ("dion", "dion", 0.25), ("dion_full", "dion", 1.0), ("muon", "muon", 0.25)
    )
    for who, roles in (("actor", ["actor"]), ("critic", ["critic"]), ("both", ["actor", "critic"]))
}  # fmt: skip
CHANGED_ALL = {
    **CHANGED, **CHANGED_KEYS, **CHANGED_LAG, **CHANGED_PLACEMENT, **CHANGED_OPTIMIZERS
}  # fmt: skip
"""Against VAPO, written out: the arms read the recipes, and these must not say anything else."""


def changed_by_adapters(form):
    """The same of a form's arms with adapters, whose learning rates are multiples of the form's."""
    rates = {"actor": 5e-4 if form == "lora" else 2.5e-4, "critic": 5e-4}
    lora = {"alpha": 32.0, "targets": None, "path": None, "share_base": True}
    return {
        f"rank{rank}_{who}_x{times}": {
            **{f"optimizer.{r}_learning_rate": rates[r] * times for r in roles},
            "model.lora": {**lora, "rank": rank, "roles": roles},
        }
        for rank in (1, 8, 32)
        for who, roles in (
            ("actor", ["actor"]), ("critic", ["critic"]), ("both", ["actor", "critic"])
        )
        for times in (1, 3, 10)
    }  # fmt: skip


@pytest.mark.parametrize("form", TABLES)
def test_each_arm_differs_from_vapo_in_what_it_names_and_nothing_else(tmp_path, form):
    table = TABLES[form]
    arms = table.all_arms
    made = seed_jobs(tmp_path, table, 3, arms, ["algorithm.gamma=0.5"])
    jobs = {job.out.name: job for job in made}
    reward_model = {"reward_model"} if table.has_reward_model else set()
    # With exact values no critic is needed.
    # Nor one of the seed's where each arm pretrains its own.
    has_adapters = form.removeprefix("keys_") == "lora"
    values = set() if form == "keys_rare" or has_adapters else {"value"}
    assert set(jobs) - set(arms) == {"base", "data"} | values | reward_model
    vapo = jobs["vapo"].settings
    start = {"critic_hf_path": "reward_model", "critic_checkpoint": "value", "hf_path": "base"}
    start |= {} if values else {"critic_checkpoint": None}
    start |= {} if table.has_reward_model else {"critic_hf_path": None}
    for name, value in start.items():
        assert vapo[f"model.{name}"] == value, "the seed's own"
    for name in set(arms) - {"vapo"}:
        settings = jobs[name].settings
        differing = changed_by_adapters(form)[name] if has_adapters else CHANGED_ALL[name]
        # What VAPO has already is no change.
        differing = {f: v for f, v in differing.items() if vapo[f] != v}
        fields = [f for f in vapo if vapo[f] != settings.get(f) and not f.startswith("made from")]
        # Some runs are longer, and evaluated more often.
        of_tables = jobs["value" if values else "vapo"].settings
        own = {
            "algorithm.policy_steps": arms[name].policy_steps,
            "evaluation.every_steps": arms[name].evaluated_every,
        }
        assert {f: settings[f] for f in own} == {f: v or of_tables[f] for f, v in own.items()}
        fields = [f for f in fields if f not in own]
        assert {field: settings[field] for field in fields} == differing, name
        uses_reward_model = settings["model.critic_hf_path"] is not None
        assert ("seed_3/reward_model" in jobs[name].needs) == uses_reward_model
        has_value = bool(values) and "model.critic_checkpoint" not in differing
        assert ("seed_3/value" in jobs[name].needs) == has_value
    assert all(jobs[name].settings["algorithm.gamma"] == 0.5 for name in (*arms, *values))
    tasks = {
        "lag": "short", "placement": "long", "optimizers": "short", "keys_optimizers": "keys",
        "lora": "short", "keys_lora": "keys",
    }  # fmt: skip
    task = tasks.get(form, form)
    assert all(jobs[name].settings["form"] == task for name in ("base", "data"))
    # More than one process is started by the command.
    alone = vapo["rollout.num_processes"] + vapo["parallel.world_size"] == 1
    assert ("-m vapo_megatron train" in " ".join(jobs["vapo"].command)) is not alone
    if not values:
        return
    stage = jobs["value"].settings
    changes = {field for field in vapo if vapo[field] != stage.get(field)}
    assert changes - {"algorithm.policy_steps", "evaluation.every_steps"} == {
        "algorithm.stage", "algorithm.value_pretraining_steps", "evaluation.path",
        "model.critic_checkpoint", "made from value",
        *(change.partition("=")[0] for change in table.value_changes),
        *(change.partition("=")[0] for change in arms["vapo"].changes),
    }  # fmt: skip


def test_the_tables_arms(tmp_path):
    short = TABLES["short"]
    assert len(short.arms) == 11 and set(short.all_arms) == {"vapo", *CHANGED}
    only = seed_jobs(tmp_path, short, 3, {"grpo": short.arms["grpo"]}, [])
    assert [job.out.name for job in only] == ["base", "data", "grpo"], "it needs no critic"
    with pytest.raises(UserError, match="--arms vapoo: .* --form short; known: vapo, ppo"):
        arms_by_name("short", ["vapoo"])
    with pytest.raises(UserError, match="--arms grpo: no such arm with --form long; known: vapo"):
        arms_by_name("long", ["grpo"])


def leave_arm(root, seed: int, arm: str, *more: str, whole: bool = True) -> None:
    """What an invocation leaves of an arm and its needs: 10 s each, accuracy .5 + seed / 100."""
    table = TABLES["short"]
    for job in seed_jobs(root, table, seed, {arm: table.all_arms[arm]}, more):
        rows = [row(step, 0.5 + seed / 100) for step in (0, job.num_steps)]
        leave(job, rows, finished=whole or job.out.name != arm, seconds=10.0)


def titles(root) -> list[tuple[str, ...]]:
    """(arm, accuracy of each seed) of the rows of a table."""
    lines = (root / "table.md").read_text().split("\n\n")[0].splitlines()[2:]
    rows = [line.split("|") for line in lines]
    return [(cells[1].split("(")[-1].strip(" )"), *cells[3].split()) for cells in rows]


def test_the_table_is_of_all_that_is_there(tmp_path, capsys):
    def ablate(*arguments: str) -> str:
        assert ablation.main(["--out", str(tmp_path), "--seeds", "1", *arguments]) == 0
        return capsys.readouterr().out

    leave_arm(tmp_path, 0, "grpo")
    ablate("--arms", "grpo")
    page = tmp_path / "comparison.html"
    assert titles(tmp_path) == [("grpo", "0.500")] and not page.exists(), "one run, no comparison"

    other = "algorithm.dynamic_sampling=true"
    leave_arm(tmp_path, 10, "grpo")
    leave_arm(tmp_path, 2, "vapo")
    leave_arm(tmp_path, 2, "grpo")
    leave_arm(tmp_path, 3, "grpo", other)
    leave_arm(tmp_path, 0, "no_decoupled_gae_95")
    leave_arm(tmp_path, 0, "dapo", whole=False)
    leave_arm(tmp_path, 0, "no_group_sampling")
    (tmp_path / "seed_of_mine").mkdir()
    said = ablate("--arms", "grpo")
    # In the table's order. What nobody began has no row, and what has other settings no number.
    text = (tmp_path / "table.md").read_text()
    assert "| DAPO (dapo) | - | - | - | - | - | - | - | - | - | 50 |\n" in text
    # .5 and .6, without vapo, and .52 in the seed in which both are.
    assert "(grpo) | 0.540 +- 0.053 | 0.500 0.520 0.600 | +0.000, below in 0 of 1 |" in text
    assert titles(tmp_path) == [
        ("vapo", "-", "0.520", "-"), ("no_group_sampling", "0.500", "-", "-"),
        ("grpo", "0.500", "0.520", "0.600"), ("dapo", "-"),
        ("no_decoupled_gae_95", "0.500", "-", "-"),
    ]  # fmt: skip
    assert "4 arms, 6 runs" in page.read_text()
    assert "not in the table, because made with other settings: seed_3/grpo\n" in said
    # 10 s each: base, data, reward_model, value and four arms; of seed 2 the same and two arms; of
    # seed 10 base, data and one arm. 8 + 6 + 3.
    assert "in this invocation; the table's 17 jobs took 2 m 50 s in total" in said

    for name in ("seed_0", "seed_10"):
        shutil.rmtree(tmp_path / name)
    leave_arm(tmp_path, 0, "grpo", other)
    # It does not fit this arm, and that is no matter of those that are run.
    leave_arm(tmp_path, 2, "no_group_sampling")
    said = ablate("--arms", "grpo", other)
    assert titles(tmp_path) == [("grpo", "0.500", "0.530")] and page.exists()
    assert "with other settings: seed_2/vapo, seed_2/no_group_sampling, seed_2/grpo\n" in said
    shutil.rmtree(tmp_path / "seed_3")
    ablate("--arms", "grpo", other)
    assert titles(tmp_path) == [("grpo", "0.500")] and not page.exists(), "of runs that are gone"


@pytest.mark.parametrize(
    "override, told",
    [
        ("seed=5", "each seed has its own; remove it: --seeds chooses the seeds"),
        ("model.hf_path=x", "each seed has its own"),
        ("model={hf_path: x}", "each seed has its own"),
        ("data.train_path=x", "each seed has its own"),
        ("model.critic_hf_path=x", "each seed has its own"),
        ("model.critic_checkpoint=x", "each seed has its own"),
        ("evaluation.path=x", "each seed has its own"),
        ("evaluation.path=null", "each seed has its own"),
        ("logging.run_dir=x", "each run has its own; remove it and use --out"),
        ("algorithm={stage: value_pretraining, value_pretraining_steps: 3}", "the arms train"),
        ("algorithm.value_pretraining_steps=3", "values are pretrained once for all arms"),
        ("algorithm.policy_steps=0", ".* give 1 or more"),
    ],
)
def test_what_each_seed_has_of_its_own_is_not_for_all_arms(
    tmp_path, capsys, monkeypatch, override, told
):
    monkeypatch.setattr(command, "run_jobs", lambda *_, **__: pytest.fail("something is run"))
    # A form without a reward model, which an override would add.
    form = "long" if "critic_hf" in override else "short"
    out = tmp_path / "out"
    assert ablation.main(["--form", form, "--out", str(out), "--arms", "vapo", override]) == 2
    field, _, value = override.partition("=")
    if value.startswith("{"):
        inner, _, value = value.strip("{}").partition(",")[0].partition(": ")
        field = f"{field}.{inner}"
    said = capsys.readouterr().err
    assert re.match(rf"ablation: {field}={value} for all arms: {told}", said), said
    assert not out.exists()


def test_no_title_names_a_technique_that_the_form_is_without(tmp_path):
    """positive_lm_coef is 0 for the long form's arms, so that no one is the paper's VAPO."""
    table = TABLES["long"]
    arms = table.all_arms
    jobs = {job.out.name: job for job in seed_jobs(tmp_path, table, 0, arms, [])}
    assert {jobs[name].settings["algorithm.positive_lm_coef"] for name in arms} == {0}
    short = TABLES["short"].arms
    first, *others = arms
    assert arms[first].title == f"VAPO {short['no_positive_lm'].title}"
    assert arms[first].paper == short["no_positive_lm"].paper
    assert all(arms[name].title.startswith("and without ") for name in others)
    assert not any(arms[name].paper for name in others), "the paper left out one at a time"


def learned(run) -> list[dict[str, float]]:
    """A run's metrics, without what the machine decides."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        {k: v for k, v in row.items() if "second" not in k and not k.startswith("memory/")}
        for row in rows
    ]


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_two_arms_end_to_end(tmp_path):
    """From nothing, and again: base, problems, reward model, value checkpoint, training, table."""
    sizes = [
        "algorithm.policy_steps=2", "algorithm.responses_per_step=32", "algorithm.group_size=8",
        "algorithm.mini_batch_size=16", "evaluation.samples=1", "rollout.max_response_tokens=64",
    ]  # fmt: skip
    out = tmp_path / "ablation"
    given = ("--seeds", 1, "--out", out, "--arms", "no_token_level", "grpo", *sizes)
    said, text = done("ablation", *given), (out / "table.md").read_text()
    assert text in said
    cells = {line.split(" | ")[0]: line.split(" | ") for line in text.splitlines()[2:]}
    assert len(cells) == 2
    for name, line in zip(("no_token_level", "grpo"), cells.values()):
        rows = (out / "seed_0" / name / "metrics.jsonl").read_text().splitlines()
        assert line[1] == f"{json.loads(rows[-1])['evaluation/avg@1']:.3f}" and len(rows) == 3
    assert (out / "comparison.html").stat().st_size > 10_000

    # The arm was trained in a fork; a process of its own trains the same, bit by bit.
    job = seed_jobs(out, TABLES["short"], 0, arms_by_name("short", ["grpo"]), sizes)[-1]
    alone = tmp_path / "alone"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*job.command, f"logging.run_dir={alone}"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600)
    assert learned(alone) == learned(job.out)

    assert "6 of 6 already finished" in done("ablation", *given)
    assert (out / "table.md").read_text() == text
    other = start("ablation", *given, "algorithm.gamma=0.9")
    assert other.returncode == 2
    assert "algorithm.gamma is 0.9, was 1.0" in other.stderr and "--rerun" in other.stderr
