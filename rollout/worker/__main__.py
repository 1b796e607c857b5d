"""`python -m rollout.worker`: one rollout worker with its engine, a role of the run.

Starts the engine and the agent, joins the coordinator and works until SIGTERM (exit code 0) or until something it
cannot go on without is gone (exit code 2, the cause as the last lines of the log).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import logging
import signal
from collections.abc import Callable
from pathlib import Path

from envclient.base.configs import section
from envclient.base.errors import ConfigError, main_guard
from envclient.base.files import write_json_atomic
from envclient.base.processes import die_with_parent, log_to_stderr
from envclient.base.wire import Client, token_from_environment
from envclient.client import EnvClient
from rollout.config import FactoryConfig, ModelConfig, RolloutConfig, RunConfig
from rollout.protocol import Agent, Engine
from rollout.worker.service import RolloutWorker

log = logging.getLogger("venus.worker")


def make_engine(
    run_dir: Path, worker: str, model_path: str, token: str, run: RunConfig, model: ModelConfig, config: RolloutConfig
) -> Engine:
    """The engine that `rollout.worker.engine` names."""
    # Each worker samples its own stream.
    seed = run.seed * 1000 + sum(worker.encode())
    if config.worker.engine == "scripted":
        from rollout.adapters.scripted_engine import ScriptedEngine

        try:
            return ScriptedEngine(seed=seed, slots=config.worker.slots, **config.worker.engine_args)
        except TypeError as error:
            raise ConfigError(f"rollout.worker.engine_args: {error}", "see ScriptedEngine's arguments") from None
    if config.worker.engine == "sglang":
        from rollout.adapters.sglang_engine import SglangEngine

        return SglangEngine(
            model_path=model_path,
            model=model,
            worker=config.worker,
            log=run_dir / "logs" / f"engine-{worker}.log",
            token=token,
            seed=seed,
        )
    raise ConfigError(f"rollout.worker.engine is {config.worker.engine!r}", "choose sglang or scripted")


def make_agent(config: FactoryConfig, environment: EnvClient, model_path: str, context_length: int) -> Agent:
    """The agent that `rollout.agent` names.

    Raises:
        ConfigError: the factory cannot be imported, or does not take the given arguments.
    """
    module_name, _, function_name = config.factory.partition(":")
    try:
        factory: Callable[..., Agent] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"rollout.agent.factory={config.factory!r}: {error}",
            "write package.module:function of something importable",
        ) from None
    try:
        return factory(environment=environment, model_path=model_path, context_length=context_length, **config.args)
    except TypeError as error:
        raise ConfigError(f"rollout.agent.args={dict(config.args)}: {error}", "see the factory's arguments") from None


def check_sampling(config: RolloutConfig) -> None:
    """Refuse sampling whose log-probs the trainer cannot reproduce."""
    sampling = config.sampling
    if not sampling.temperature > 0:
        raise ConfigError(f"rollout.sampling.temperature is {sampling.temperature}", "it must be above 0")
    if sampling.top_p != 1.0 or sampling.top_k != -1:
        raise ConfigError(
            f"rollout.sampling: top_p={sampling.top_p}, top_k={sampling.top_k} truncate the distribution",
            "use top_p=1.0 and top_k=-1: other log-probs cannot be reproduced by the trainer",
        )


async def work(arguments: argparse.Namespace) -> None:
    """Bring everything up, work, and take everything down again."""
    token = token_from_environment()
    config_path = arguments.run_dir / "config.yaml"
    run = section(config_path, "run", RunConfig)
    model = section(config_path, "model", ModelConfig)
    config = section(config_path, "rollout", RolloutConfig)
    check_sampling(config)
    engine = make_engine(arguments.run_dir, arguments.worker, arguments.model, token, run, model, config)
    async with contextlib.AsyncExitStack() as stack:
        environment = await stack.enter_async_context(EnvClient(arguments.environment, token))
        client = await stack.enter_async_context(Client(arguments.coordinator, token))
        agent = make_agent(config.agent, environment, arguments.model, model.context_length)
        predictor = None
        if arguments.predictor:
            predictor = await stack.enter_async_context(Client(arguments.predictor, token))
        worker = RolloutWorker(
            name=arguments.worker,
            engine=engine,
            agent=agent,
            coordinator=client,
            config=config,
            context_length=model.context_length,
            version=arguments.version,
            predictor=predictor,
        )
        try:
            await engine.start()
            await worker.run()
        finally:
            await engine.stop()
            log.info("agent: %s", agent.statistics())
            if worker.estimates is not None:
                folder = arguments.run_dir / "predictor"
                folder.mkdir(exist_ok=True)
                write_json_atomic(folder / f"worker-{arguments.worker}.json", worker.estimates.statistics())
            await agent.aclose()


async def until_sigterm(arguments: argparse.Namespace) -> None:
    """`work`, ended quietly by SIGTERM."""
    working = asyncio.ensure_future(work(arguments))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        log.info("terminated")


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(prog="rollout.worker")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--environment", required=True)
    parser.add_argument("--predictor", default="", help="its URL, where the run has one")
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    log_to_stderr(arguments.worker)
    asyncio.run(until_sigterm(arguments))


if __name__ == "__main__":
    main_guard(main)
