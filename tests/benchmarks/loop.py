"""The whole loop against the sum of its parts run alone.

One quickstart run on this machine saves what it trained. Then each part does the same work by itself: the engine
generates as many tokens from the same contexts, the environment executes the same actions, the actor trains the same
groups. `ratio` = (generation + environment + training alone) / the loop's time: above 1 by what the loop hides by
overlapping them, below 1 by what joining them costs (weight syncs, waiting for the last of a batch).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envclient.base.configs import to_yaml
from envclient.base.files import read_jsonl, write_atomic
from envclient.base.ports import listen, port_of
from envclient.client import EnvClient
from examples.agents.repair import make_agent
from megatron_venus.config import VenusConfig
from megatron_venus.launch import resolve
from megatron_venus.rollout_log import read_rollouts
from megatron_venus.supervisor import Supervisor
from rollout.adapters.sglang_engine import SglangEngine
from rollout.protocol import GenerateRequest
from rollout.types import Purpose, TrainGroup, TrainSequence, TrajectoryStatus

QUICKSTART = Path("examples/configs/quickstart.yaml")
Say = Callable[[str], None]
Turns = list[tuple[int, int]]


def run(quick: bool, say: Say) -> dict[str, Any]:
    """Run the loop, then its parts; `--quick` makes 3 optimizer steps, otherwise 10."""
    steps = 3 if quick else 10
    with tempfile.TemporaryDirectory(prefix="venus-loop-") as root:
        overrides = [f"run.root={root}", f"run.steps={steps}", "run.save_rollouts=true", "run.wandb=false"]
        config = resolve(QUICKSTART, overrides)
        say(f"the loop, {steps} steps")
        command = [sys.executable, "-m", "megatron_venus.launch", "--config", str(QUICKSTART), *overrides]
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=900)
        run_dir = Path(root) / config.run.name
        rows = read_jsonl(run_dir / "metrics.jsonl")
        rollouts = read_rollouts(run_dir)
        alone = asyncio.run(_parts_alone(config, Path(root) / "alone", rollouts, say))
        say("training alone")
        alone["train_s"] = _train_alone(run_dir, Path(root) / "alone")
    sync_s = sum(row["sync/seconds"] for row in rows)
    loop_s = sum(row["time/step_s"] for row in rows)
    sequences = [sequence for groups in rollouts.values() for group in groups for sequence in group.sequences]
    tokens = sum(sum(sequence.loss_mask) for sequence in sequences)
    rooms = {
        "rollout": sum(row["time/rollout_s"] for row in rows),
        "train": sum(row["time/train_s"] for row in rows),
        "sync": sync_s,
    }
    return {
        "benchmark": "loop",
        "ratio": sum(alone.values()) / loop_s,
        "baseline": "sum of the parts run alone: same contexts generated, same actions executed, same groups trained",
        "sizes": {
            "steps": steps,
            "groups": sum(map(len, rollouts.values())),
            "trajectories": len(sequences),
            "generated_tokens": tokens,
            "subset": "3 of the 10 steps" if quick else "all",
        },
        "loop_s": loop_s,
        "alone": alone,
        "per_second": {
            "tokens": tokens / loop_s,
            "trajectories": len(sequences) / loop_s,
            "groups": sum(map(len, rollouts.values())) / loop_s,
            "steps": steps / loop_s,
        },
        "share_of_loop": {room: seconds / loop_s for room, seconds in rooms.items()},
    }


def turns_of(sequence: TrainSequence) -> Turns:
    """[start, end) of every generated turn in the response."""
    turns: Turns = []
    start = -1
    for place, generated in enumerate([*sequence.loss_mask, 0]):
        if generated and start < 0:
            start = place
        elif not generated and start >= 0:
            turns.append((start, place))
            start = -1
    return turns


async def _parts_alone(
    config: VenusConfig, folder: Path, rollouts: dict[int, list[TrainGroup]], say: Say
) -> dict[str, float]:
    folder.mkdir()
    write_atomic(folder / "config.yaml", to_yaml(config))
    batches = [[(g.task_id, s) for g in groups for s in g.sequences] for _, groups in sorted(rollouts.items())]
    async with Supervisor(folder) as supervisor:
        say("generation alone")
        engine = SglangEngine(
            model_path=config.model.path,
            model=config.model,
            worker=config.rollout.worker,
            log=folder / "logs" / "engine.log",
            token=supervisor.token,
            seed=1,
        )
        await engine.start()
        try:
            await _generate(engine, config, batches[:1], tokens_limit=200)  # first requests build the engine's caches
            generate_s = await _generate(engine, config, batches)
        finally:
            await engine.stop()
        say("environment alone")
        sock = listen("127.0.0.1")
        argv = [sys.executable, "-m", "envclient.controller", "--run-dir", str(folder), "--fd", str(sock.fileno())]
        await supervisor.start("environment", argv, pass_fds=[sock.fileno()])
        url = f"http://127.0.0.1:{port_of(sock)}"
        sock.close()
        async with EnvClient(url, supervisor.token) as env:
            environment_s = await _play(env, config, batches)
    return {"generate_s": generate_s, "environment_s": environment_s}


async def _generate(
    engine: SglangEngine, config: VenusConfig, batches: list[list[tuple[str, TrainSequence]]], tokens_limit: int = 0
) -> float:
    """Seconds to generate as many tokens after the same contexts, no tool in between, as many slots as the loop."""
    slots = asyncio.Semaphore(config.rollout.worker.slots)
    stop = json.loads((Path(config.model.path) / "generation_config.json").read_text())["eos_token_id"]
    wanted = made = 0

    async def episode(name: str, sequence: TrainSequence) -> None:
        nonlocal wanted, made
        for number, (start, end) in enumerate(turns_of(sequence)):
            if tokens_limit and made > tokens_limit:
                return
            async with slots:
                got = await engine.generate(
                    GenerateRequest(
                        request_id=f"{name}.{number}",
                        trajectory_id=name,
                        input_ids=sequence.prompt_ids + sequence.response_ids[:start],
                        max_new_tokens=end - start,
                        temperature=1.0,
                        stop_token_ids=stop if isinstance(stop, list) else [stop],
                    )
                )
            wanted += end - start
            made += len(got.token_ids)

    started = time.monotonic()
    for number, batch in enumerate(batches):
        await engine.flush()  # the loop flushes at every weight sync
        await asyncio.gather(*(episode(f"{number}.{i}", s) for i, (_, s) in enumerate(batch)))
    # A turn may stop a little earlier than the recorded one did: scale to the same number of tokens.
    return (time.monotonic() - started) * wanted / max(1, made)


async def _play(env: EnvClient, config: VenusConfig, batches: list[list[tuple[str, TrainSequence]]]) -> float:
    """Seconds to execute the same actions, all of a step's episodes at once."""
    agent = make_agent(
        environment=env,
        model_path=config.model.path,
        context_length=config.model.context_length,
        **config.rollout.agent.args,
    )
    ready = agent.episode(batches[0][0][0], "warm", Purpose.TRAIN)
    await ready.open()  # the templates warm up before the clock starts, as they do before the loop's first step
    await ready.close()

    async def episode(task_id: str, name: str, sequence: TrainSequence) -> None:
        played = agent.episode(task_id, name, Purpose.TRAIN)
        try:
            await played.open()
            for start, end in turns_of(sequence):
                observation = await played.act(sequence.response_ids[start:end])
                if observation.done:
                    break
            await played.score(TrajectoryStatus.FINISHED, "replayed")
        finally:
            await played.close()

    started = time.monotonic()
    for number, batch in enumerate(batches):
        await asyncio.gather(*(episode(task, f"{number}.{i}", s) for i, (task, s) in enumerate(batch)))
    seconds = time.monotonic() - started
    await agent.aclose()
    return seconds


def _train_alone(run_dir: Path, folder: Path) -> float:
    """Seconds the actor takes for the same groups when they all lie ready."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [*torchrun, "-m", "tests.benchmarks._train_alone", str(run_dir), str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr, timeout=600)
    return float(json.loads((folder / "train_alone.json").read_text())["seconds"])
