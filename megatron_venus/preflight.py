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

import httpx

from envclient.base.errors import ConfigError, PreflightError, VenusError
from envclient.base.ports import listen
from envclient.base.wire import TOKEN_VARIABLE
from megatron_venus import algorithms, layout_rules, machine
from megatron_venus.architecture import Architecture
from megatron_venus.config import VenusConfig
from megatron_venus.model_files import check_model_files
from megatron_venus.plan import GB, MemoryPlan, Target, check_engine, check_fits, memory_plan
from megatron_venus.plan.devices import needed_gpus
from rollout.predictor.settings import check_settings
from rollout.rope import check_context, rope_of
from rollout.types import POLICY_NAMES, POLICY_ORDERS, POLICY_RANGES

LIVE_POLICIES = tuple(name for name in POLICY_NAMES if name != "oracle")
"""`oracle` needs true lengths, which only a simulation has."""
NEEDED_DISK_BYTES = 512 << 20
PROBE_TIMEOUT_S = 3.0
"""An environment service that does not answer within it counts as not there."""
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
        "actor.gpus_per_machine": config.actor.gpus_per_machine,
        "actor.micro_batch_tokens": config.actor.micro_batch_tokens,
        "model.context_length": config.model.context_length,
        "env.max_sandboxes": config.env.max_sandboxes,
        "run.eval_samples": run.eval_samples,
    }
    for key, count in positive.items():
        if count < 1:
            raise ConfigError(f"{key}={count} must be at least 1", "raise it")
    layout_rules.check_sizes(config.actor)
    updates = config.actor.loss.updates_per_batch
    if updates > 1 and group.batch % updates:
        raise ConfigError(
            f"rollout.group.batch={group.batch} is not divisible by actor.loss.updates_per_batch={updates}",
            "every update takes the same number of groups: change either",
        )
    if not config.actor.gpu_memory_gb >= 0.0:
        raise ConfigError(f"actor.gpu_memory_gb={config.actor.gpu_memory_gb} is no size", "use for example 80")
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


def read_model(config: VenusConfig) -> dict[str, Any]:
    """The model's parsed config.json.

    Raises:
        ConfigError: not there, or no JSON object.
    """
    path = Path(config.model.path) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"model.path={config.model.path!r}: config.json is not there", "name a Hugging Face model folder"
        )
    try:
        model = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"model.path={config.model.path!r}: config.json is not JSON: {error}", "mend or replace it"
        ) from None
    if not isinstance(model, dict):
        raise ConfigError(f"model.path={config.model.path!r}: config.json is no JSON object", "mend or replace it")
    return model


def check_model(config: VenusConfig) -> None:
    """The model is one that the actor builds, in this layout, and the context fits its positions."""
    model = read_model(config)
    kinds = model.get("architectures") or []
    if kinds not in (["Qwen3ForCausalLM"], ["Qwen3MoeForCausalLM"]):
        raise ConfigError(
            f"model.path={config.model.path!r}: architecture {kinds} is not supported",
            "use Qwen3ForCausalLM or Qwen3MoeForCausalLM",
        )
    layout_rules.check_model(config.actor, model)
    source = f"model.path={config.model.path!r}"
    check_context(config.model.context_length, rope_of(model, config.model.yarn, source), source)


def check_weights(config: VenusConfig) -> None:
    """The model's folder has a tokenizer and weights."""
    folder = Path(config.model.path)
    for needed in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / needed).is_file():
            raise ConfigError(
                f"model.path={config.model.path!r}: {needed} is not there", "name a Hugging Face model folder"
            )
    if not _has_weights(config):
        raise ConfigError(f"model.path={config.model.path!r}: no *.safetensors", "name a folder with weights")


def _has_weights(config: VenusConfig) -> bool:
    """Any at all, or an index of some: `check_model_files` then says whether they are whole."""
    return any(Path(config.model.path).glob("*.safetensors*"))


def memory_target(config: VenusConfig) -> Target:
    """What the memory plan must fit: the GPUs that the config names, else this machine's, else its memory."""
    stated = config.actor.gpu_memory_gb
    if stated:
        return Target(kind="GPU", capacity=int(stated * GB), source=f"actor.gpu_memory_gb={stated:g}")
    gpus = machine.gpu_memories()
    if gpus:
        return Target(kind="GPU", capacity=min(gpus), source="this machine's smallest GPU")
    return Target(kind="host", capacity=machine.host_memory(), source="this machine's memory, no GPU")


def plan_memory(config: VenusConfig) -> MemoryPlan:
    """The actor's memory sum, whether it fits or not."""
    return memory_plan(config, _architecture(config), memory_target(config))


def check_memory(config: VenusConfig) -> None:
    """The actor's memory plan fits, and on GPUs the engines' weights and KV do."""
    arch, target = _architecture(config), memory_target(config)
    check_engine(config, arch, target)
    check_fits(config, arch, read_model(config), target)


def _architecture(config: VenusConfig) -> Architecture:
    arch = Architecture.from_hf(read_model(config), config.model.path)
    arch.check_actor(config.model.path)
    return arch


def check_gpus(config: VenusConfig) -> None:
    """A run on GPUs has one for every rank and engine process, and they are as large as the config says."""
    stated, gpus, needed = config.actor.gpu_memory_gb, machine.gpu_memories(), needed_gpus(config)
    if not stated and not gpus:
        return
    if len(gpus) < needed:
        raise PreflightError(
            f"this machine has {len(gpus)} GPUs, the config needs {needed} (actor.ranks={config.actor.ranks}, engines "
            f"{needed - config.actor.ranks})",
            "start it where they are; on a CPU machine: bash examples/quickstart.sh"
            if stated
            else "CUDA_VISIBLE_DEVICES= (empty) runs it on the CPU",
        )
    if stated and min(gpus) < stated * GB:
        raise PreflightError(
            f"actor.gpu_memory_gb={stated:g}, but a GPU here has {min(gpus) / GB:.1f} GB", "state what there is"
        )


def check_environment(config: VenusConfig) -> None:
    """An environment service that runs elsewhere answers, and its token is known here."""
    url = config.env.url
    if not url:
        return
    if not os.environ.get(TOKEN_VARIABLE):
        raise PreflightError(f"env.url={url!r} needs that service's token", f"set {TOKEN_VARIABLE} in the environment")
    try:
        reply = httpx.get(f"{url.rstrip('/')}/health", timeout=PROBE_TIMEOUT_S, trust_env=False)
        role = reply.json().get("role") if reply.status_code == 200 else f"HTTP {reply.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError) as error:
        raise PreflightError(
            f"env.url={url!r}: no environment service answers within {PROBE_TIMEOUT_S:g} s ({type(error).__name__})",
            "start it there, or leave env.url out",
        ) from None
    if role != "environment":
        raise PreflightError(f"env.url={url!r} is not an environment service ({role})", "correct the address")


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


def check_config(config: VenusConfig) -> None:
    """All that can be said of the config and the model's shape, on any machine."""
    check_values(config)
    check_model(config)


def check_here(config: VenusConfig, run_dir: Path) -> None:
    """This machine, the code that the config names, and the model's weights where there are any."""
    check_environment(config)
    check_machine(config, run_dir)
    if _has_weights(config):
        check_model_files(config, run_dir)
    try:
        check_factories(config)
    except VenusError:
        raise
    except OSError as error:
        raise ConfigError(f"rollout.tasks: {error}", "check rollout.tasks.args") from None


def lacking_here(config: VenusConfig) -> list[str]:
    """What a start on this machine would still lack though a plan can be made: weights, GPUs; one line each."""
    lacking = []
    for check in (check_weights, check_gpus):
        try:
            check(config)
        except VenusError as error:
            lacking.append(str(error))
    return lacking


def check_all(config: VenusConfig, run_dir: Path) -> None:
    """Every check, cheapest first."""
    check_config(config)
    check_memory(config)
    check_weights(config)
    check_gpus(config)
    check_here(config, run_dir)
