"""Tests of what only a GPU can show; skipped, with this reason, where `torch.cuda.is_available()` is false."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
NO_GPU = "no GPU: torch.cuda.is_available() is false"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if HERE not in item.path.parents:
            continue
        needed = item.get_closest_marker("gpus")
        if gpus == 0:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
        elif needed and gpus < needed.args[0]:
            reason = f"needs {needed.args[0]} GPUs, torch.cuda.device_count() is {gpus}"
            item.add_marker(pytest.mark.skip(reason=reason))
