"""Reads and validates the configuration.

Precedence: defaults < YAML files (later ones win) < `section.field=value`. A recipe's name stands
for its file in recipes/. Imports neither torch nor megatron, so that `--help` and `--dry-run` start
fast.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel, ValidationError

from vapo_megatron.config.help import explain_errors
from vapo_megatron.config.peers import REMOVED, of_peers
from vapo_megatron.config.rules import check_together
from vapo_megatron.config.schema import VapoConfig
from vapo_megatron.config.section import sections_by_name
from vapo_megatron.errors import ConfigError

RECIPES = Path(__file__).with_name("recipes")
"""What each algorithm's paper sets, by its name."""


def load_config(
    path: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()
) -> VapoConfig:
    """Read YAML files (later ones win), apply overrides, validate everything.

    Args:
        path: one file or several, each a path or the name of a recipe.
        overrides: strings `section.field=value`; the value is parsed as YAML.

    Raises:
        ConfigError: names the field, its value, the rule and the remedy.
    """
    config = read_config(path, overrides)
    check_together(config)
    return config


def read_config(
    path: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()
) -> VapoConfig:
    """Like load_config without check_together, for callers that still change fields."""
    tree: dict[str, Any] = {}
    for file in [path] if isinstance(path, str | Path) else path:
        _merge(tree, _read_yaml(config_file(file)), str(file))
    if isinstance(overrides, str):
        raise ConfigError(f"overrides={overrides!r} must be a list of texts; write [{overrides!r}]")
    for override in overrides:
        _merge(tree, _parse_override(override), f"override {override!r}")
    _drop_removed(tree)
    _suggest_unknown(VapoConfig, tree, "")
    try:
        return VapoConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(explain_errors(error.errors()))) from None


def recipe_names() -> list[str]:
    """Return the names of the recipes, each a file of algorithm fields."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def config_file(given: str | Path) -> Path:
    """Return the recipe's file where a name is given that has one; else the path as it is.

    With a directory or a suffix, such as ./vapo or vapo.yaml, it is a path.

    Raises:
        ConfigError: it is no recipe's name, and there is no such file.
    """
    file, name = Path(given), str(given)
    names = recipe_names()
    if name in names:
        return RECIPES / f"{name}.yaml"
    if file.suffix not in (".yaml", ".yml") and "/" not in name and not file.exists():
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"--config {name} is neither a file nor a recipe; {hint}recipes are {', '.join(names)}"
        )
    return file


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys instead of silently dropping one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # SafeLoader rejects it with a better message.
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key.value!r}", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(file.read_text(), Loader=_UniqueKeys)
        _copy({"": tree})  # RecursionError for an anchor that contains its own alias.
    except OSError as error:
        raise ConfigError(
            f"config file {file}: {error.strerror}; give an existing YAML file"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = _problem(error)
        raise ConfigError(f"config file {file}: invalid YAML: {problem}; fix the file") from None
    if not isinstance(tree, dict | None):
        raise ConfigError(
            f"config file {file} must contain sections such as 'algorithm:', found "
            f"{type(tree).__name__}; give the path of a configuration file"
        )
    return tree or {}


def _problem(error: Exception) -> str:
    """The parser's message on one line, without the excerpt of the file."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"{error.problem} at line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def _parse_override(text: str) -> dict[str, Any]:
    name, separator, value = text.partition("=")
    parts = name.strip().split(".")
    if not separator or "" in parts:
        raise ConfigError(
            f"override {text!r} must have the form section.field=value, for example "
            "algorithm.gamma=0.99"
        )
    try:
        parsed: Any = yaml.safe_load(value) if value.strip() else None
    except (yaml.YAMLError, ValueError, RecursionError):
        parsed = value
    for part in reversed(parts):
        parsed = {part: parsed}
    return parsed


def _merge(into: dict[str, Any], tree: dict[str, Any], where: str) -> None:
    for key, value in tree.items():
        if isinstance(into.get(key), dict):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {key} is a section; set {key}.FIELD=VALUE")
            _merge(into[key], value, where)
        else:
            into[key] = value if not isinstance(value, dict) else _copy(value)


def _copy(tree: dict[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, dict) else v for k, v in tree.items()}


def _drop_removed(tree: dict[str, Any]) -> None:
    """Accept the configuration of a run by an earlier version, which names every field."""
    for path, (neutral, _) in REMOVED.items():
        section, field = path.split(".")
        named = tree.get(section)
        if isinstance(named, dict) and field in named and named[field] == neutral:
            del named[field]


def _suggest_unknown(section: type[BaseModel], tree: dict[str, Any], prefix: str) -> None:
    for key, value in tree.items():
        field = section.model_fields.get(key)
        if field is None:
            _refuse_unknown(section, str(key), value, prefix)
        kind = field.annotation
        named = sections_by_name(kind)
        if named and isinstance(value, dict):
            for name, inner in value.items():
                if not isinstance(name, str):
                    raise ConfigError(f"{prefix}{key}: the name {name!r} must be text; quote it")
                _suggest_in_section(named, inner, f"{prefix}{key}.{name}")
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            _suggest_in_section(kind, value, f"{prefix}{key}")


def _refuse_unknown(section: type[BaseModel], key: str, value: Any, prefix: str) -> NoReturn:
    """Name the field that is meant: of this name, another trainer's, or the most similar one."""
    leaves = _leaves(value, f"{prefix}{key}")
    for path in leaves:
        if path in REMOVED:
            raise ConfigError(f"{path} is no longer a field: {REMOVED[path][1]}")
        hint = of_peers(path, least_parts=2) or _same_name(path) or of_peers(path)
        if hint is not None:
            raise ConfigError(f"unknown field {path}; {hint}")
    raise ConfigError(f"unknown field {prefix}{key}; {_hint(section, key, prefix, leaves)}")


def _leaves(value: Any, path: str) -> list[str]:
    """Return the paths of a tree's values; of the value alone if it is none."""
    if not isinstance(value, dict) or not value:
        return [path]
    return [leaf for name, inner in value.items() for leaf in _leaves(inner, f"{path}.{name}")]


def _suggest_in_section(section: type[BaseModel], tree: Any, path: str) -> None:
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is a section, found {tree!r}; set {path}.FIELD=VALUE")
    _suggest_unknown(section, tree, f"{path}.")


def _all_fields() -> list[str]:
    """Return every field of a section, as section.field; those of a section within one last."""
    found: list[str] = []
    nested: list[str] = []
    for name, top in VapoConfig.model_fields.items():
        for inner, info in getattr(top.annotation, "model_fields", {}).items():
            own = getattr(info.annotation, "model_fields", None)
            if own is None:
                found.append(f"{name}.{inner}")
            else:
                nested += [f"{name}.{inner}.{field}" for field in own]
    return found + nested


def _same_name(path: str) -> str | None:
    """Suggest the field of the same name in another section."""
    last = path.rpartition(".")[2]
    same = [field for field in _all_fields() if field.rpartition(".")[2] == last]
    return f"did you mean {same[0]}?" if same else None


def _hint(section: type[BaseModel], key: str, prefix: str, leaves: list[str]) -> str:
    """Suggest a similar name in this section or in another one, or list all names."""
    names = list(section.model_fields)
    if close := difflib.get_close_matches(key, names, n=1):
        return f"did you mean {prefix}{close[0]}?"
    fields = {field.rpartition(".")[2]: field for field in reversed(_all_fields())}
    for path in leaves:
        if close := difflib.get_close_matches(path.rpartition(".")[2], fields, n=1, cutoff=0.7):
            return f"did you mean {fields[close[0]]}?"
    return f"valid names: {', '.join(names)}"
