"""A checkpoint trains the predictor anew, and the SGLang that answers takes the new weights without a pause."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from omegaconf import OmegaConf

from envclient.base.files import read_json
from envclient.base.ports import listen, port_of
from envclient.base.processes import start_child
from envclient.base.wire import TOKEN_VARIABLE, Client
from rollout.predictor.model import LengthModel, load
from rollout.protocol import PredictReply, PredictRequest
from tests.conftest import MODEL, TOKEN
from tests.unit.predictor_kit import told_episodes

pytestmark = pytest.mark.sglang
TEXTS = [list(range(40, 40 + length)) for length in (4, 9, 30)]
TOLERANCE = 1e-3


def answers(model: LengthModel) -> list[float]:
    return [max(1.0, math.expm1(score)) for score in model.predict(TEXTS)]


def engines(service: int) -> set[int]:
    """Processes of SGLang servers under the predictor's service."""
    children = psutil.Process(service).children(recursive=True)
    return {child.pid for child in children if "rollout.sglang_plugin.serve" in " ".join(child.cmdline())}


@pytest.mark.timeout(300)
def test_a_checkpoint_refreshes_the_engine_that_answers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = load(MODEL, 9.0)  # says that everything is long: any training betters it
    torch.nn.init.normal_(first.score.weight, std=0.1)
    first.save(tmp_path / "given")
    keys = {
        "enabled": True,
        "engine": "sglang",
        "model": str(tmp_path / "given"),
        "context_tokens": 640,
        "kv_tokens": 8192,
        "refresh_minutes": 0.05,
    }
    others = {key: {"factory": "not.asked:for"} for key in ("tasks", "agent")}
    OmegaConf.save({"rollout": others | {"predictor": keys}}, tmp_path / "config.yaml")
    for folder in ("logs", "predictor"):
        (tmp_path / folder).mkdir()
    rows = b"".join(msgspec.json.encode(row) + b"\n" for row in told_episodes(24))
    (tmp_path / "predictor" / "episodes-000000.jsonl").write_bytes(rows)

    async def scenario() -> None:
        socket = listen("127.0.0.1")
        url = f"http://127.0.0.1:{port_of(socket)}"
        argv = [sys.executable, "-m", "rollout.predictor.serve", "--run-dir", str(tmp_path), "--fd"]
        env = os.environ | {TOKEN_VARIABLE: TOKEN}
        child = await start_child(
            "predictor",
            [*argv, str(socket.fileno())],
            tmp_path / "logs" / "predictor.log",
            env=env,
            pass_fds=[socket.fileno()],
        )
        socket.close()
        try:
            async with Client(url, TOKEN) as client:

                async def ask() -> list[float | None]:
                    asked = [
                        PredictRequest(trajectory_id=f"p{place}", turn=1, token_ids=text)
                        for place, text in enumerate(TEXTS)
                    ]
                    replies = [client.call("/v1/predict", request, PredictReply) for request in asked]
                    return [reply.remaining_tokens for reply in await asyncio.gather(*replies)]

                while None in (said := await ask()):
                    assert child.returncode is None, (tmp_path / "logs" / "predictor.log").read_text()
                    await asyncio.sleep(0.25)
                assert said == pytest.approx(answers(first), rel=TOLERANCE)
                before = engines(child.process.pid)
                manifest = tmp_path / "checkpoints" / "step_3" / "manifest.json"
                manifest.parent.mkdir(parents=True)
                manifest.write_text("{}")
                pointer = tmp_path / "predictor" / "current.json"
                while not pointer.exists():
                    said = await ask()
                    assert None not in said, "nobody answers while it is trained"
                    await asyncio.sleep(0.1)
                assert read_json(pointer) == {"model": "model-000003", "step": 3}
                second = answers(load(tmp_path / "predictor" / "model-000003"))
                assert await ask() == pytest.approx(second, rel=TOLERANCE)
                assert min(abs(a / b - 1) for a, b in zip(second, answers(first), strict=True)) > 0.1
                assert engines(child.process.pid) == before != set(), "it is the same engine"
        finally:
            await child.stop(grace_s=10.0)

    asyncio.run(asyncio.wait_for(scenario(), 280))
