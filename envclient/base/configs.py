"""Structured configs: dataclasses give keys, types and defaults; YAML and `key=value` fill them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from envclient.base.errors import ConfigError

T = TypeVar("T")


def _explain(error: OmegaConfBaseException, source: str, schema: DictConfig) -> ConfigError:
    key = str(getattr(error, "full_key", "") or "")
    text = str(error.msg if hasattr(error, "msg") else error).split("\n")[0]
    if "not in" in text or "not a member" in text or type(error).__name__ in ("ConfigKeyError", "ConfigAttributeError"):
        parent, _, leaf = key.rpartition(".")
        node = OmegaConf.select(schema, parent) if parent else schema
        known = [str(k) for k in node] if isinstance(node, DictConfig) else []
        near = difflib.get_close_matches(leaf, known, n=1)
        hint = f"did you mean {parent + '.' if parent else ''}{near[0]}?" if near else f"known: {', '.join(known)}"
        return ConfigError(f"{source}: unknown key {key!r}", hint)
    return ConfigError(f"{source}: {key or 'config'}: {text}", "see the key's comment in its config class")


def build(schema: type[T], layers: Sequence[tuple[str, Any]], overrides: Sequence[str] = ()) -> T:
    """Merge `layers` (name, mapping or DictConfig) and `key=value` overrides over the dataclass `schema`.

    Returns an instance of `schema` with every interpolation resolved.

    Raises:
        ConfigError: unknown key, wrong type, missing value or malformed override; names the key and its source.
    """
    base: DictConfig = OmegaConf.structured(schema)
    merged: Any = base
    for name, layer in layers:
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            raise _explain(error, name, base) from None
    for item in overrides:
        key, eq, _ = item.partition("=")
        if not eq or not key:
            raise ConfigError(f"command line: {item!r} is not key=value", "write for example run.steps=3")
        try:
            merged = OmegaConf.merge(merged, OmegaConf.from_dotlist([item]))
        except OmegaConfBaseException as error:
            raise _explain(error, f"command line {item!r}", base) from None
        except yaml.YAMLError as error:
            line = str(error).splitlines()[0]
            raise ConfigError(f"command line: {item!r} is not YAML: {line}", "close every bracket and quote") from None
    try:
        OmegaConf.resolve(merged)
        missing = OmegaConf.missing_keys(merged)
        if missing:
            raise ConfigError(
                f"config: {sorted(missing)[0]} has no value", "give it one in the config or on the command line"
            )
        result = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise _explain(error, "config", base) from None
    assert isinstance(result, schema)
    return result


def read_yaml(path: Path) -> DictConfig:
    """The mapping in YAML file `path`.

    Raises:
        ConfigError: no such file, or it is not a YAML mapping.
    """
    if not path.is_file():
        raise ConfigError(f"config file {str(path)!r} does not exist", "look in examples/configs")
    try:
        loaded = OmegaConf.load(path)
    except Exception as error:
        raise ConfigError(
            f"config file {str(path)!r} is not YAML: {str(error).splitlines()[0]}", "mend that line"
        ) from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"config file {str(path)!r} is not a mapping", "its top level must be keys")
    return loaded


def section(path: Path, name: str, schema: type[T]) -> T:
    """Section `name` of the resolved run config in `path`, as an instance of `schema`."""
    whole = read_yaml(path)
    if name not in whole:
        raise ConfigError(f"{path}: section {name!r} is missing", "start the role through megatron_venus.launch")
    return build(schema, [(f"{path.name}:{name}", whole[name])])


def to_yaml(config: Any) -> str:
    """YAML text of a config instance."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))
