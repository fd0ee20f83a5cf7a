"""The environments that have a name, and the packages that they need."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

from vapo_megatron.errors import ConfigError


class Named(NamedTuple):
    """What a name stands for."""

    use: str
    """"module:Class"."""
    package: str | None = None
    """What it imports; None: nothing beyond this package's own requirements."""
    install: str = ""
    """The command that installs it."""


BUILT_IN = {
    "tools": Named("vapo_megatron.environments.tools:Tools"),
    "gymnasium": Named(
        "vapo_megatron.environments.gymnasium_text:Gymnasium",
        "gymnasium",
        "pip install 'vapo-megatron[gymnasium]'",
    ),
    # No extra: it asks for versions of msgspec and reasoning-gym that vLLM and this package do not
    # have, and for no Python above 3.12.0, and needs none of these.
    "gem": Named(
        "vapo_megatron.environments.gem_games:Gem",
        "gem",
        "pip install 'vapo-megatron[reasoning-gym]', then pip install --no-deps "
        "--ignore-requires-python gem-llm==0.1.0",
    ),
    "skyrl_gym": Named(
        "vapo_megatron.environments.skyrl_text:SkyRLGym",
        "skyrl_gym",
        "pip install 'vapo-megatron[skyrl-gym]'",
    ),
    "openenv": Named(
        "vapo_megatron.environments.openenv_client:OpenEnv",
        "websockets",
        "pip install 'vapo-megatron[openenv]'",
    ),
}


def resolve(use: str) -> str:
    """Return "module:Class" for a built-in name, and any other place as it is.

    Args:
        use: a name of BUILT_IN, "package.module:NAME" or "path/to/file.py:NAME".

    Raises:
        ConfigError: it is neither, or its package is missing; does not import it.
    """
    if ":" in use:
        return use
    if use not in BUILT_IN:
        raise ConfigError(
            f"environment.use={use} must be one of {', '.join(BUILT_IN)}, or package.module:NAME "
            "or path/to/file.py:NAME of your own"
        )
    named = BUILT_IN[use]
    if named.package is not None and importlib.util.find_spec(named.package) is None:
        raise ConfigError(
            f"environment.use={use} needs the package {named.package}, which is not installed; "
            + named.install
        )
    return named.use
