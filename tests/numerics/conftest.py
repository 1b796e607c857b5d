"""Models made once a session; one thread, so that two replicas share the machine fairly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.numerics import kit


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.make_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.make_model(tmp_path_factory.mktemp("untied"), tied=False)
