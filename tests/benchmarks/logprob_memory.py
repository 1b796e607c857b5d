"""Peak memory of log-probs and their gradient over a 151,936-token vocabulary: flat in the number of tokens.

Each size runs in a process of its own, which forgets its peak after the inputs are made and reads it again at the end:
what is measured is the memory beyond rows, weights and their gradients, which any way of computing must hold. The naive
log-softmax is measured at 8K tokens and computed above, from its bytes per token. `ratio` is the naive peak over
ours at the largest size; `growth` is our peak there over that at 8K.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 151_936
HIDDEN = 16
SIZES = {"8K": 8_192, "32K": 32_768, "128K": 131_072}
NAIVE_TOKENS = 8_192
"""At most: where the machine has too little memory the naive one is measured at fewer, and the number is stated."""
NAIVE_COPIES = 3
"""[T, vocabulary] tensors in float32 that the naive backward pass needs at once, to choose a size that fits."""
TIMEOUT_S = 3600


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    names = ["8K", "32K"] if quick else list(SIZES)
    naive_tokens = NAIVE_TOKENS
    while naive_tokens * VOCABULARY * 4 * NAIVE_COPIES > 0.75 * _free_bytes():
        naive_tokens //= 2
    naive = _measure("naive", naive_tokens)
    say(f"naive at {naive_tokens} tokens: peak {naive['peak_bytes'] >> 20} MiB, {naive['seconds']:.1f} s")
    per_token = naive["peak_bytes"] / naive_tokens
    ours, naive_bytes = {}, {}
    for name in names:
        ours[name] = _measure("chunked", SIZES[name])
        naive_bytes[name] = round(per_token * SIZES[name])
        say(f"chunked at {name}: peak {ours[name]['peak_bytes'] >> 20} MiB, {ours[name]['seconds']:.1f} s")
    largest = names[-1]
    return {
        "benchmark": "logprob_memory",
        "ratio": round(naive_bytes[largest] / ours[largest]["peak_bytes"], 2),
        "baseline": f"log_softmax of [T, {VOCABULARY}] in float32, measured at {naive_tokens} tokens, computed above",
        "sizes": {name: SIZES[name] for name in names} | {"subset": "8K and 32K tokens" if quick else "all"},
        "growth": round(ours[largest]["peak_bytes"] / ours["8K"]["peak_bytes"], 3),
        "vocabulary": VOCABULARY,
        "hidden": HIDDEN,
        "peak_bytes": {name: ours[name]["peak_bytes"] for name in names},
        "naive_peak_bytes": naive_bytes,
        "naive_measured_tokens": naive_tokens,
        "seconds": {name: round(ours[name]["seconds"], 1) for name in names},
        "naive_seconds": round(naive["seconds"], 1),
    }


def _free_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


def _measure(how: str, tokens: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.logprob_memory", how, str(tokens)],
        # Freed buffers go back at once, so that the resident set is what is alive.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{how} at {tokens} tokens failed: {done.stderr[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _resident_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}")


def _child(how: str, tokens: int) -> dict[str, Any]:
    import torch

    from megatron_venus.loss import token_log_probs

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    # What any way of computing holds at its end is there before the measurement.
    rows.grad, weight.grad = torch.ones_like(rows), torch.ones_like(weight)

    def compute(count: int) -> None:
        if how == "naive":
            log_p = torch.log_softmax(rows[:count] @ weight.T, -1)
            chosen = log_p.gather(-1, targets[:count, None])[:, 0]
        else:
            chosen, _ = token_log_probs(rows[:count], targets[:count], weight, 1.0)
        chosen.sum().backward()

    compute(1)  # Threads and kernels of the library.
    Path("/proc/self/clear_refs").write_text("5")  # Forgets the peak.
    before = _resident_bytes("VmRSS")
    started = time.monotonic()
    compute(tokens)
    return {"peak_bytes": _resident_bytes("VmHWM") - before, "seconds": time.monotonic() - started}


if __name__ == "__main__":
    print(json.dumps(_child(sys.argv[1], int(sys.argv[2]))))
