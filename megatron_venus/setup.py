"""From config and checkpoint to the parts that the training loop moves. Called once by `train` on every process."""

from __future__ import annotations

import functools
import logging
import os
import socket
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_venus import algorithms
from megatron_venus.adapters import cpu
from megatron_venus.checkpoint_index import Checkpoint, open_checkpoint
from megatron_venus.config import VenusConfig
from megatron_venus.rollout_log import RolloutLog
from megatron_venus.safetensors_header import read_folder
from rollout.policy.advantages import AdvantageRule
from rollout.rope import check_context, read_rope

if TYPE_CHECKING:
    from megatron_venus.adapters.export import WeightExport
    from megatron_venus.adapters.layout import Layout
    from megatron_venus.checkpoint_saver import CheckpointSaver
    from megatron_venus.grad_stream import GradientStream
    from megatron_venus.weight_sync import WeightSync

log = logging.getLogger("venus.setup")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What the loop needs besides the coordinator."""

    layout: Layout
    stream: GradientStream
    export: WeightExport
    sync: WeightSync
    rollouts: RolloutLog
    saver: CheckpointSaver


def build(config: VenusConfig, run_dir: Path, token: str, resume: Checkpoint | None) -> Parts:
    """Join the other processes, build the model and load weights: the run's model, or all that `resume` holds."""
    algorithms.check(config)
    # Megatron warns of every accelerator library that is not there (on a CPU machine all of them) and logs its configs.
    logging.getLogger("megatron").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    if "GLOO_SOCKET_IFNAME" not in os.environ and os.environ.get("MASTER_ADDR", "").startswith(("127.", "localhost")):
        _use_loopback_if_nameless()
    cpu.install()

    from megatron_venus import architecture, checkpoint, hf_folder, weight_map
    from megatron_venus.adapters import layout as layouts
    from megatron_venus.adapters.export import WeightExport
    from megatron_venus.adapters.megatron import Actor
    from megatron_venus.checkpoint_saver import CheckpointSaver
    from megatron_venus.grad_stream import GradientStream
    from megatron_venus.reference import FrozenReference
    from megatron_venus.weight_sync import WeightSync

    model, actor_config = config.model, config.actor
    layout = layouts.join(actor_config.parallel)
    source = Path(model.path)
    arch = architecture.read_architecture(source)
    rope = read_rope(source, model.yarn)
    check_context(model.context_length, rope, model.path)
    # The headers, before any weight is loaded.
    weight_map.check_shapes({name: tensor.shape for name, tensor in read_folder(source).items()}, arch, str(source))
    first = open_checkpoint(Path(model.megatron), "model.megatron") if model.megatron else None
    weights = functools.partial(checkpoint.load_weights, first) if first else hf_folder.read_weights(source)
    actor = Actor(arch, weights, actor_config.optimizer, layout, rope=rope, dtype=model.dtype, seed=config.run.seed)
    if first:
        checkpoint.check_weights(first, actor, "make it again with python -m ckpt_tools.from_hf")
    # Before a checkpoint is loaded: the reference is what the run started from.
    reference = FrozenReference(actor.chunks) if actor_config.loss.kl.place != "none" else None
    nonfinite_steps = checkpoint.load(resume, actor) if resume else 0
    if resume:
        log.info("resumed from the checkpoint of step %d", resume.step)
    stream = GradientStream(
        actor,
        actor_config.loss,
        actor_config.optimizer,
        temperature=config.rollout.sampling.temperature,
        micro_batch_tokens=actor_config.micro_batch_tokens,
        skip_zero_advantage=actor_config.skip_zero_advantage,
        advantage=AdvantageRule.from_config(config.rollout.advantage),
        reference=reference,
        nonfinite_steps=nonfinite_steps,
    )

    log.info("loss: %s", algorithms.summary(config))
    export = WeightExport(actor)
    sync = WeightSync(export, arch, actor_config.sync, token)
    rollouts = RolloutLog(run_dir, layout.replica, config.run.save_rollouts and layout.head)
    saver = CheckpointSaver(run_dir, actor, actor_config.checkpoint, hf_source=source)
    return Parts(layout=layout, stream=stream, export=export, sync=sync, rollouts=rollouts, saver=saver)


def _use_loopback_if_nameless() -> None:
    """Gloo binds to the address of the host's name; a name that resolves to nothing would stop a local run."""
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def leave() -> None:
    """Wait for the other processes, then leave the process group."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
