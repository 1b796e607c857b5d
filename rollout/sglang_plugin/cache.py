"""The radix cache that `--radix-cache-backend venus` names: SGLang's own for now, the seat of reference tiers later."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.plugins.hook_registry import HookRegistry

from rollout.sglang_plugin.hooks import AROUND
from rollout.sglang_plugin.targets import TargetError


class VenusRadixCache(RadixCache):
    """Prefix cache of one scheduler."""


def make_cache(context: Any) -> VenusRadixCache:
    """Called by SGLang in the scheduler process, after all hooks were applied.

    Raises:
        TargetError: a hook was not applied (SGLang only logs that).
    """
    unhooked = [target for target in AROUND if target not in HookRegistry._patched]
    if unhooked:
        raise TargetError(f"venus plug-in: SGLang did not apply the hook on {unhooked[0]}")
    return VenusRadixCache(context.params)
