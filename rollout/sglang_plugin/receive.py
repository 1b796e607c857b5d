"""How an engine takes part in a weight broadcast: one buffer a bucket, and no wait without an end.

SGLang's own receiver allocates every tensor and then their concatenation, two buckets in all; its groups wait half an
hour for a peer that is gone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

_TIMEOUT = re.compile(r"-timeout-(\d+)ms\b")


def group_timeout(group_name: str) -> timedelta | None:
    """How long members wait for one another: SGLang's request has no field for it, so the group's name says it."""
    match = _TIMEOUT.search(group_name)
    return timedelta(milliseconds=int(match[1])) if match else None


def receive_bucket(
    group: Any, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], device: Any
) -> list[tuple[str, Any]]:
    """The tensors of a bucket, views of one buffer, from rank 0 of `group`. All have one type.

    Raises:
        RuntimeError: a peer is gone, or the group's timeout is over.
    """
    import torch

    (dtype,) = {getattr(torch, name) for name in dtypes}
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    # As bytes: gloo does not know every type.
    torch.distributed.broadcast(flat.view(torch.uint8), src=0, group=group)
    return [(name, part.view(*shape)) for name, part, shape in zip(names, flat.split(sizes), shapes, strict=True)]
