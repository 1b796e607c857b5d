"""What VenusRL adds inside SGLang 0.5.17, through its entry point `sglang.srt.plugins`; SGLang is not forked.

SGLang calls `register` in the server and again in every scheduler process. It swallows a plug-in's exceptions, so
every target is checked first and the cache backend is registered last: with anything amiss `--radix-cache-backend
venus` names an unknown backend and the server does not start.

**Checksums for weight sync.** `POST {engine}/weights_checker` with `{"action": "venus_checksum"}` (bearer token)
answers `{"success": true, "ranks": [{"checksums": {name: hex}, ...}, ...]}`, one entry per tensor-parallel rank: the
checksum (XXH3, 128 bits) of every parameter's contiguous raw bytes, of the tensor the engine samples with. Names
and layouts are the engine's: `...qkv_proj.weight` is cat(q, k, v) on dim 0, `...gate_up_proj.weight` is cat(gate, up)
on dim 0, both per rank; a tied `lm_head` does not appear beside `model.embed_tokens.weight`. The action `venus_layout`
answers the same with type and shape in place of the checksum, at once.
"""

from __future__ import annotations

from typing import Any

from rollout.sglang_plugin.targets import check_targets

CACHE_BACKEND = "venus"


def register() -> None:
    """Entry point: install hooks and the cache backend, or raise TargetError with the first thing that does not fit."""
    check_targets()
    from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rollout.sglang_plugin import hooks

    if CACHE_BACKEND in registered_radix_cache_backends():
        return
    for target, hook in hooks.AROUND.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    register_radix_cache_backend(CACHE_BACKEND, _cache)


def _cache(context: Any) -> Any:
    from rollout.sglang_plugin.cache import make_cache

    return make_cache(context)
