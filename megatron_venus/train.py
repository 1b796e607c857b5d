"""THE training loop: pull groups, add their gradients, step, send the weights, again.

Started by the launcher under torchrun: `python -m megatron_venus.train --run-dir DIR --coordinator URL
--resume-step S`. Every replica (one process, or those that share a model) pulls groups at its own pace; rank 0 alone
speaks for the actor. Weight version s is the one that optimizer step s made. A kill at any moment is safe: the last
manifest is what counts.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from envclient.base import configs
from envclient.base.errors import PreflightError, main_guard
from envclient.base.processes import die_with_parent, log_to_stderr
from envclient.base.wire import token_from_environment
from megatron_venus import setup
from megatron_venus.checkpoint_index import Checkpoint, checkpoint_dir, read_checkpoint
from megatron_venus.config import VenusConfig
from megatron_venus.coordinator_link import CoordinatorLink
from rollout.config import RunConfig
from rollout.types import BatchClosed, BatchCounts


def train(config: VenusConfig, run_dir: Path, coordinator: str, resume: Checkpoint | None) -> None:
    """Build the actor, train, and leave no save in flight."""
    token = token_from_environment()
    parts = setup.build(config, run_dir, token, resume)
    link = CoordinatorLink(coordinator, token, parts.layout.replica, config.actor)
    with parts.saver:
        make_steps(config.run, link, parts, resume.step if resume else 0)
    parts.sync.close()
    setup.leave()


def make_steps(run: RunConfig, link: CoordinatorLink, parts: setup.Parts, made: int) -> None:
    """Make optimizer steps after the `made` ones until `run.steps`, or until the tasks are used up."""
    leader = parts.layout.head and parts.layout.replica == 0
    saved = made
    if leader and run.eval_before and made == 0:
        link.evaluate("before", 0)
    if leader and made > 0:
        evaluate_periodically(run, link, made)  # the kill may have prevented it; one that was made is not made again
    while made < run.steps:
        step, seconds = made + 1, {"time/wait_s": 0.0, "time/train_s": 0.0}
        counts = add_groups(step, link, parts, seconds)
        if counts.groups == 0:
            break
        started = time.monotonic()
        result = parts.stream.finish(step, counts)
        seconds["time/train_s"] += time.monotonic() - started
        if leader:
            link.report_step(step, skipped=result.skipped, counts=counts, metrics=result.metrics | seconds)
            link.end_sync(step, parts.sync.send(step, link.begin_sync(step)))
        parts.export.finish()
        made = step
        if run.checkpoint_every and step % run.checkpoint_every == 0:
            parts.saver.save(step, parts.stream.nonfinite_steps)
            saved = step
        if leader:
            evaluate_periodically(run, link, step)
    if made > saved:
        parts.saver.save(made, parts.stream.nonfinite_steps)
    if leader and run.eval_after:
        link.evaluate("after", made)


def evaluate_periodically(run: RunConfig, link: CoordinatorLink, step: int) -> None:
    """Evaluate the weights of `step`, where `run.eval_every` asks for it."""
    if run.eval_every and step % run.eval_every == 0 and step < run.steps:
        link.evaluate(f"step{step:06d}", step)


def add_groups(step: int, link: CoordinatorLink, parts: setup.Parts, seconds: dict[str, float]) -> BatchCounts:
    """Stream this replica's share of the batch into the gradient, until the coordinator closes it."""
    while True:
        started = time.monotonic()
        parts.saver.check()
        group = parts.layout.share(lambda: link.next_group(step, parts.saver.check))
        arrived = time.monotonic()
        seconds["time/wait_s"] += arrived - started
        if isinstance(group, BatchClosed):
            return group.counts
        tokens = parts.stream.add(group)
        if parts.layout.head:
            link.acknowledge(group, tokens)
            parts.rollouts.write(group)
        seconds["time/train_s"] += time.monotonic() - arrived


def main() -> None:
    die_with_parent()
    log_to_stderr("actor")
    parser = argparse.ArgumentParser(prog="megatron_venus.train")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--resume-step", type=int, required=True)
    args = parser.parse_args()
    path = args.run_dir / "config.yaml"
    config = configs.build(VenusConfig, [(str(path), configs.read_yaml(path))])
    resume = None
    if args.resume_step > 0:
        folder = checkpoint_dir(args.run_dir, args.resume_step)
        resume = read_checkpoint(folder)
        if resume is None:
            raise PreflightError(f"{folder} is not a complete checkpoint", "start with resume=auto, which picks one")
    # Torch is imported only here: a wrong command line is answered before. `record` hands the error to torchrun, whose
    # report is the last thing in the log.
    from torch.distributed.elastic.multiprocessing.errors import record

    record(train)(config, args.run_dir, args.coordinator, resume)


if __name__ == "__main__":
    main_guard(main)
