"""Checks before anything heavy starts. Each failure is one line that names the key, the value and the remedy.

Called by `launch` once the config is resolved; imports no torch, so that a mistake is answered in a second.
"""

from __future__ import annotations

import ctypes.util
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envclient.base.errors import ConfigError, PreflightError, VenusError
from envclient.base.ports import listen
from megatron_venus import algorithms, layout_rules
from megatron_venus.config import VenusConfig
from megatron_venus.model_files import check_model_files
from rollout.predictor.settings import check_settings
from rollout.rope import check_context, rope_of
from rollout.types import POLICY_NAMES, POLICY_ORDERS, POLICY_RANGES

LIVE_POLICIES = tuple(name for name in POLICY_NAMES if name != "oracle")
"""`oracle` needs true lengths, which only a simulation has."""
NEEDED_DISK_BYTES = 512 << 20
_LIBRARIES = {"numa": "libnuma1", "ibverbs": "libibverbs1", "seccomp": "libseccomp2"}


def check_values(config: VenusConfig) -> None:
    """Values that parse but cannot work."""
    run, group, worker = config.run, config.rollout.group, config.rollout.worker
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run.name):
        raise ConfigError(f"run.name={run.name!r} is not a folder name", "use letters, digits, '-', '_' and '.'")
    positive = {
        "run.steps": run.steps,
        "rollout.group.size": group.size,
        "rollout.group.batch": group.batch,
        "rollout.group.max_version_span": group.max_version_span,
        "rollout.worker.count": worker.count,
        "rollout.worker.slots": worker.slots,
        "rollout.worker.max_trajectories": worker.max_trajectories,
        "actor.ranks": config.actor.ranks,
        "actor.micro_batch_tokens": config.actor.micro_batch_tokens,
        "model.context_length": config.model.context_length,
        "env.max_sandboxes": config.env.max_sandboxes,
        "run.eval_samples": run.eval_samples,
    }
    for key, count in positive.items():
        if count < 1:
            raise ConfigError(f"{key}={count} must be at least 1", "raise it")
    layout_rules.check_sizes(config.actor)
    if group.size < 2:
        raise ConfigError("rollout.group.size=1 has no baseline: every advantage would be 0", "use at least 2")
    if group.async_factor < 1.0:
        raise ConfigError(
            f"rollout.group.async_factor={group.async_factor} is below 1.0: a batch could never fill", "use 1.0 or more"
        )
    choices = {
        "run.resume": (run.resume, ("never", "auto", "overwrite")),
        "model.dtype": (config.model.dtype, ("float32", "bfloat16")),
        "rollout.policy.name": (config.rollout.policy.name, LIVE_POLICIES),
        "rollout.policy.order": (config.rollout.policy.order, POLICY_ORDERS),
        "rollout.group.on_lost_member": (group.on_lost_member, ("drop", "shrink")),
        "env.backend": (config.env.backend, ("process",)),
        "rollout.worker.engine": (worker.engine, ("sglang", "scripted")),
    }
    for key, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"{key}={value!r} is not known", f"one of: {', '.join(allowed)}")
    algorithms.check(config)
    for name, (low, high) in POLICY_RANGES.items():
        value = getattr(config.rollout.policy, name)
        if not low <= value <= high:
            raise ConfigError(f"rollout.policy.{name}={value} is out of range", f"use {low} to {high}")
    check_settings(config.rollout.predictor)
    sampling = config.rollout.sampling
    if not (math.isfinite(sampling.temperature) and sampling.temperature > 0):
        raise ConfigError(
            f"rollout.sampling.temperature={sampling.temperature} has no log-probs", "use a value above 0"
        )
    if sampling.top_p != 1.0 or sampling.top_k != -1:
        raise ConfigError(
            f"rollout.sampling.top_p={sampling.top_p}, top_k={sampling.top_k}: "
            "the trainer cannot reproduce log-probs of a truncated distribution",
            "use top_p=1.0 and top_k=-1",
        )
    if worker.kv_tokens < config.model.context_length:
        raise ConfigError(
            f"rollout.worker.kv_tokens={worker.kv_tokens} cannot hold one context of {config.model.context_length}",
            "raise it to at least model.context_length",
        )
    if worker.max_trajectories * worker.count > config.env.max_sandboxes:
        raise ConfigError(
            f"env.max_sandboxes={config.env.max_sandboxes} is less than the {worker.count} x {worker.max_trajectories} "
            "trajectories that workers may hold open",
            "raise it, or lower rollout.worker.max_trajectories",
        )


def check_model(config: VenusConfig) -> None:
    """The model's folder is a Qwen3 checkpoint with a tokenizer, and the context fits its positions."""
    folder = Path(config.model.path)
    for needed in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if not (folder / needed).is_file():
            raise ConfigError(
                f"model.path={config.model.path!r}: {needed} is not there", "name a Hugging Face model folder"
            )
    try:
        model = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"model.path={config.model.path!r}: config.json is not JSON: {error}", "mend or replace it"
        ) from None
    kinds = model.get("architectures") or []
    if kinds not in (["Qwen3ForCausalLM"], ["Qwen3MoeForCausalLM"]):
        raise ConfigError(
            f"model.path={config.model.path!r}: architecture {kinds} is not supported",
            "use Qwen3ForCausalLM or Qwen3MoeForCausalLM",
        )
    layout_rules.check_model(config.actor, model)
    source = f"model.path={config.model.path!r}"
    check_context(config.model.context_length, rope_of(model, config.model.yarn, source), source)


def load_factory(key: str, name: str) -> Callable[..., Any]:
    """The function that `package.module:function` names.

    Raises:
        ConfigError: not importable, or no such function; names `key`.
    """
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={name!r} cannot be loaded: {error}", "write package.module:function") from None
    if not callable(function):
        raise ConfigError(f"{key}={name!r} is not a function", "write package.module:function")
    return function  # type: ignore[no-any-return]


def check_factories(config: VenusConfig) -> None:
    """Tasks load, there are enough of them, and the agent's arguments exist."""
    tasks, agent = config.rollout.tasks, config.rollout.agent
    make_source = load_factory("rollout.tasks.factory", tasks.factory)
    try:
        source = make_source(**tasks.args)
    except TypeError as error:
        raise ConfigError(f"rollout.tasks.args: {error}", f"see {tasks.factory}") from None
    if not source.train_ids():
        raise ConfigError("rollout.tasks: no training task", "check rollout.tasks.args")
    evaluates = config.run.eval_before or config.run.eval_after or config.run.eval_every
    if evaluates and not source.eval_ids():
        raise ConfigError("run.eval_*: there is no held-out task", "check rollout.tasks.args or switch evaluation off")
    parameters = inspect.signature(load_factory("rollout.agent.factory", agent.factory)).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for key in agent.args:
        if key not in parameters and not takes_any:
            known = ", ".join(k for k in parameters if k not in ("environment", "model_path", "context_length"))
            raise ConfigError(f"rollout.agent.args: unknown key {key!r}", f"known: {known}")


def check_machine(config: VenusConfig, run_dir: Path) -> None:
    """Programs, libraries, Python packages and disk space."""
    if not config.env.url and config.env.backend == "process" and shutil.which("bwrap") is None:
        raise PreflightError("program bwrap is missing (env.backend=process)", "apt-get install bubblewrap")
    for library, package in _LIBRARIES.items():
        if ctypes.util.find_library(library) is None:
            raise PreflightError(f"library lib{library} is missing", f"apt-get install {package}")
    for module in ("sglang", "megatron", "wandb"):
        if importlib.util.find_spec(module) is None:
            raise PreflightError(f"Python package {module} is missing", "run: bash examples/quickstart.sh")
    hub = config.rollout.coordinator
    for host, port in ((config.env.host, config.env.port), (hub.host, hub.port)):
        if port:
            listen(host, port).close()
    place = run_dir
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise PreflightError(f"run.root={config.run.root!r}: cannot write to {place}", "choose another run.root")
    free = shutil.disk_usage(place).free
    if free < NEEDED_DISK_BYTES:
        raise PreflightError(
            f"run.root={config.run.root!r}: {free >> 20} MiB of disk are free, {NEEDED_DISK_BYTES >> 20} are needed",
            "make room or choose another run.root",
        )


def check_all(config: VenusConfig, run_dir: Path) -> None:
    """Every check, cheapest first."""
    check_values(config)
    check_model(config)
    check_model_files(config, run_dir)
    check_machine(config, run_dir)
    try:
        check_factories(config)
    except VenusError:
        raise
    except OSError as error:
        raise ConfigError(f"rollout.tasks: {error}", "check rollout.tasks.args") from None
