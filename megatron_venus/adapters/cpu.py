"""Megatron-core 0.16.1 on a machine without CUDA: every adaptation, in this one file.

`install()` comes before any other import of `megatron.core`. Where CUDA is there it does nothing at all. The patched
functions look at their caller and change only what code inside `megatron.*` sees, so that the rest of the program still
meets a torch without CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from envclient.base.errors import PreflightError

MEGATRON_VERSION = "0.16.1"
_CPU = torch.device("cpu")
_installed = False


def check_version() -> None:
    """Refuse a Megatron-core that these adaptations were not made for.

    Raises:
        PreflightError: not installed, or another version.
    """
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != MEGATRON_VERSION:
        raise PreflightError(
            f"megatron-core {found} is installed, the actor needs {MEGATRON_VERSION}", "install requirements.txt"
        )


def install() -> None:
    """Make `megatron.core` importable and runnable here; inert with CUDA and at the second call."""
    global _installed
    check_version()
    if torch.cuda.is_available() or _installed:
        return
    _installed = True
    _patch_factories()
    _patch_cuda_calls()
    _patch_random_states()
    _patch_adam()
    _patch_expert_dispatch()


def _called_by_megatron() -> bool:
    """Whether the caller of the patched function (two frames up) is Megatron's code."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith("megatron.")


def _only_megatron(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs) if _called_by_megatron() else original(*args, **kwargs)

    return patched


def _patch_factories() -> None:
    """Tensors that Megatron asks for on `cuda` come on the CPU, unpinned."""

    def on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if device is not None and str(device).startswith("cuda") and _called_by_megatron():
                kwargs["device"] = _CPU
                kwargs.pop("pin_memory", None)
            return original(*args, **kwargs)

        return patched

    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _patch_cuda_calls() -> None:
    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
    ]
    for owner, name, replacement in patches:
        setattr(owner, name, _only_megatron(getattr(owner, name), replacement))

    # The optimizers tell their parameters apart by the strings 'torch.cuda.FloatTensor' and its kin.
    original_type = torch.Tensor.type

    def type_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and _called_by_megatron():
            return str(original_type(tensor)).replace("torch.", "torch.cuda.", 1)
        return original_type(tensor, *args, **kwargs)

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]

    # The small fused helpers would be compiled with g++ at first use: minutes, for nothing on a CPU.
    from megatron.core import jit

    jit.disable_jit_fuser()


def _patch_random_states() -> None:
    """Model-parallel random states over the CPU generator."""
    from megatron.core.tensor_parallel import random as megatron_random

    class CpuRngStatesTracker(megatron_random.CudaRNGStatesTracker):  # type: ignore[misc, name-defined]
        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random state {name!r} with seed {seed} exists already")
            self.seeds_.add(seed)
            before = torch.get_rng_state()
            torch.manual_seed(seed)
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)

        @contextlib.contextmanager
        def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            before = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(before)

    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    megatron_random.CudaRNGStatesTracker = CpuRngStatesTracker


class CpuAdam(torch.optim.Optimizer):
    """Adam that keeps its step in the parameter group, as Transformer Engine's FusedAdam does.

    Megatron's `fully_reshardable` optimizer checkpoints expect that layout: with torch's own Adam (step in the state of
    every parameter) a load dies with KeyError 'step'.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._decoupled = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        from torch.optim._functional import adam, adamw

        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            done = group.get("step", 0)
            group["step"] = done + 1
            for param in params:
                if not self.state[param]:
                    self.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            (adamw if self._decoupled else adam)(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                [torch.tensor(float(done)) for _ in params],
                foreach=False,
                capturable=False,
                differentiable=False,
                fused=False,
                grad_scale=None,
                found_inf=None,
                has_complex=False,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def _patch_adam() -> None:
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer

    optimizers.Adam = distrib_optimizer.Adam = CpuAdam
    optimizers.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


def _patch_expert_dispatch() -> None:
    """Tokens travel to their experts without the side stream on which a GPU copies the counts to the CPU."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    # Without Transformer Engine 0.16.1 leaves this name undefined, and the router asks for it.
    moe_utils.te_general_gemm = None

    def to_arrays(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(self, name)
                setattr(self, name, splits.numpy() if isinstance(splits, torch.Tensor) else splits)
        return tokens_per_expert

    # Anything but None: the constructor then makes no stream.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = False
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = to_arrays
