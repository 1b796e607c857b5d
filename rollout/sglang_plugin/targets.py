"""Everything of SGLang that we hook or subclass, with the shape we rely on; checked before anything is installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect

VERSION = "0.5.17"

WEIGHT_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_BUCKET = ("self", "names", "dtypes", "shapes", "group_name")
# target -> parameters it must have, in this order (others may follow)
SIGNATURES: dict[str, tuple[str, ...]] = {
    "sglang.srt.managers.scheduler.Scheduler.flush_cache": ("self", "empty_cache"),
    "sglang.srt.managers.scheduler.Scheduler.is_fully_idle": ("self",),
    "sglang.srt.utils.weight_checker.WeightChecker.handle": ("self", "action"),
    "sglang.srt.utils.weight_checker.WeightChecker._parallelism_info": ("self",),
    f"{WEIGHT_UPDATER}.init_weights_update_group": (
        "self",
        "master_address",
        "master_port",
        "rank_offset",
        "world_size",
        "group_name",
        "backend",
    ),
    f"{WEIGHT_UPDATER}.update_weights_from_distributed": (*_BUCKET, "load_format"),
    f"{WEIGHT_UPDATER}._update_bucketed_weights_from_distributed": _BUCKET,
    "sglang.srt.utils.init_custom_process_group": ("backend", "init_method", "timeout", "world_size", "rank"),
    "sglang.srt.utils.network.NetworkAddress.to_tcp": ("self",),
    "sglang.srt.mem_cache.radix_cache.RadixCache.__init__": ("self", "params"),
    "sglang.srt.mem_cache.registry.register_radix_cache_backend": ("name", "factory"),
    "sglang.srt.plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type"),
    "sglang.srt.server_args.prepare_server_args": ("argv",),
}
# target -> names that its source must mention: attributes set in __init__, which no signature shows
MENTIONS: dict[str, tuple[str, ...]] = {
    "sglang.srt.managers.scheduler.Scheduler.is_fully_idle": ("waiting_queue", "running_batch"),
    "sglang.srt.utils.weight_checker.WeightChecker.__init__": ("_get_model",),
    f"{WEIGHT_UPDATER}.init_weights_update_group": ("_model_update_group", "tp_rank"),
    f"{WEIGHT_UPDATER}._update_bucketed_weights_from_distributed": ("get_model", "device"),
    f"{WEIGHT_UPDATER}._assert_weight_cache_inactive": ("get_model_runner", "server_args"),
}


class TargetError(RuntimeError):
    """SGLang is not the one this plug-in was written for."""


def _resolve(target: str) -> object:
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            value = getattr(value, name, None)
            if value is None:
                raise TargetError(f"venus plug-in: SGLang has no {target} (written for SGLang {VERSION})")
        return value
    raise TargetError(f"venus plug-in: SGLang has no {target} (written for SGLang {VERSION})")


def check_targets() -> None:
    """Raise TargetError naming the first target of SGLang that is missing or has another shape."""
    version = importlib.metadata.version("sglang")
    if version != VERSION:
        raise TargetError(f"venus plug-in: SGLang is {version}, the hooks are written for {VERSION} (install that one)")
    for target, wanted in SIGNATURES.items():
        found = tuple(inspect.signature(inspect.unwrap(_resolve(target))).parameters)  # type: ignore[arg-type]
        if found[: len(wanted)] != wanted:
            raise TargetError(f"venus plug-in: {target} takes {found}, the hook expects {wanted} (SGLang {VERSION})")
    for target, names in MENTIONS.items():
        source = inspect.getsource(inspect.unwrap(_resolve(target)))  # type: ignore[arg-type]
        for name in names:
            if name not in source:
                raise TargetError(f"venus plug-in: {target} does not use {name!r} any more (SGLang {VERSION})")
