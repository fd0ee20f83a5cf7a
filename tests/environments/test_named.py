"""Names of environments. Not exercised: what they name (the tests of each)."""

import importlib
import importlib.util

import pytest

from vapo_megatron.environments.named import BUILT_IN, resolve
from vapo_megatron.errors import ConfigError


@pytest.mark.parametrize("use", ["package.module:Game", "games/own.py:Game"])
def test_a_place_stays_as_it_is(use):
    assert resolve(use) == use


@pytest.mark.parametrize("name", ["tools", "gymnasium", "openenv"])
def test_a_name_is_a_class(name):
    module, _, attribute = resolve(name).partition(":")
    assert hasattr(getattr(importlib.import_module(module), attribute), "step")


def test_every_name_has_its_module():
    for named in BUILT_IN.values():
        assert importlib.util.find_spec(named.use.partition(":")[0]) is not None


def test_an_unknown_name():
    due = "environment.use=gims must be one of tools, gymnasium, gem, skyrl_gym, openenv, or"
    with pytest.raises(ConfigError, match=due):
        resolve("gims")


@pytest.mark.parametrize("name", [name for name, named in BUILT_IN.items() if named.package])
def test_a_missing_package_is_named_with_the_remedy(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError) as raised:
        resolve(name)
    message = str(raised.value)
    assert f"environment.use={name} needs the package {BUILT_IN[name].package}" in message
    assert "; pip install " in message
    extra = name.replace("_", "-")
    assert f"'vapo-megatron[{extra}]'" in message or "gem-llm==0.1.0" in message
