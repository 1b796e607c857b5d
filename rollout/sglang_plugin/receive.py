"""How an engine takes part in a weight broadcast: little memory, few copies, and no wait without an end.

SGLang's own receiver allocates every tensor of a bucket, then their concatenation, and copies once more; its groups
wait half an hour for a peer that is gone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from rollout.engine_layout import messages_of, place_of, view_in

Lies = Callable[[str, Any, tuple[int, ...]], Any]
"""(name, type, shape of a tensor) → the memory of the engine that holds it, or None."""
_TIMEOUT = re.compile(r"-timeout-(\d+)ms\b")


def group_timeout(group_name: str) -> timedelta | None:
    """How long members wait for one another: SGLang's request has no field for it, so the group's name says it."""
    match = _TIMEOUT.search(group_name)
    return timedelta(milliseconds=int(match[1])) if match else None


def receive_bucket(
    group: Any,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    device: Any,
    lies: Lies,
) -> list[tuple[str, Any]]:
    """A bucket from rank 0 of `group`: the tensors that are still to be loaded, views of one buffer.

    A tensor that comes by itself is received where it `lies`, if there is such a place. All have one type.

    Raises:
        RuntimeError: a peer is gone, or the group's timeout is over.
    """
    import torch

    (dtype,) = {getattr(torch, name) for name in dtypes}
    sizes = [torch.Size(shape).numel() for shape in shapes]
    messages = messages_of([size * dtype.itemsize for size in sizes])
    targets = [
        lies(names[start], dtype, tuple(shapes[start])) if stop == start + 1 else None for start, stop in messages
    ]
    buffered = [range(*message) for message, target in zip(messages, targets, strict=True) if target is None]
    flat = torch.empty(sum(sizes[index] for run in buffered for index in run), dtype=dtype, device=device)
    received, filled, works = [], 0, []
    for message, target in zip(messages, targets, strict=True):
        if target is None:
            begun = filled
            for index in range(*message):
                received.append((names[index], flat[filled : filled + sizes[index]].view(*shapes[index])))
                filled += sizes[index]
            target = flat[begun:filled]
        # As bytes: gloo does not know every type.
        memory = target.reshape(-1).view(torch.uint8)
        works.append(torch.distributed.broadcast(memory, src=0, group=group, async_op=True))
    for work in works:
        work.wait()
    return received


def nowhere(name: str, dtype: Any, shape: tuple[int, ...]) -> None:
    """`Lies` of an engine that takes tensors apart."""


def place_in(params: dict[str, Any]) -> Lies:
    """Where tensors lie in the parameters of an engine of one rank; None for one that has no plain place there."""

    def lies(name: str, dtype: Any, shape: tuple[int, ...]) -> Any:
        param = params.get(place_of(name, experts=0).param)
        if param is None or param.dtype != dtype:
            return None
        view = view_in(param.data, name, shape)
        return view if tuple(view.shape) == shape and view.is_contiguous() else None

    return lies
