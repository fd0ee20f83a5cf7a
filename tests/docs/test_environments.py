"""The example of docs/environments.md, played as a run plays it."""

import random
import re

import yaml

from tests.docs.commands import ROOT
from tests.environments.playing import answers, started
from vapo_megatron.config import load_config
from vapo_megatron.reward.verifier import Problem

PAGE = (ROOT / "docs/environments.md").read_text()


def block(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)[0]


def test_the_configuration_is_valid(tmp_path):
    (tmp_path / "run.yaml").write_text(block("yaml"))
    config = load_config([tmp_path / "run.yaml"], ["model.hf_path=m", "data.train_path=d"])
    assert config.environment.use == "guess.py:GuessTheNumber" and config.environment.max_turns == 7
    assert yaml.safe_load(block("yaml"))["reward"] == {"verifier": "environment"}


def test_the_game_is_played_to_its_end(tmp_path):
    (tmp_path / "guess.py").write_text(block("python"))
    assert len(block("python").splitlines()) <= 20
    with started(f"{tmp_path}/guess.py:GuessTheNumber") as playing:
        playing.begin("game", Problem("Play.", ""), 4)
        assert "seven guesses" in answers(playing, "game")["game"].observation
        number = random.Random(4).randint(1, 100)
        played = []
        for guess in ("what?", str(number - 1), str(number + 1), f" {number}."):
            playing.act("game", guess)
            played.append(answers(playing, "game")["game"])
    assert [step.observation for step in played[:3]] == [
        "Answer with a number alone.", "Too low.", "Too high.",
    ]  # fmt: skip
    assert [step.reward for step in played] == [-0.1, 0.0, 0.0, 0.0]
    assert played[3].done and played[3].verdict.status == "correct"
