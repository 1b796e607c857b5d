"""What the numerics tests share: a tiny Qwen3 folder, groups of random trajectories, and the plain reference.

Run as a module under torchrun it is one process of a streamed batch: `python -m tests.numerics.kit CASES OUT`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_venus.adapters import cpu
from megatron_venus.checkpoint_index import open_checkpoint
from megatron_venus.config import CheckpointConfig, LossConfig, OptimizerConfig, ParallelConfig
from megatron_venus.reference import FrozenReference
from rollout.config import YarnConfig
from rollout.policy.advantages import AdvantageRule
from rollout.rope import read_rope
from rollout.types import BatchCounts, Record, TrainGroup, TrainSequence, VersionSpan

VOCABULARY = 96


def make_model(
    folder: Path,
    *,
    tied: bool = True,
    seed: int = 0,
    layers: int = 2,
    experts: int = 0,
    hidden: int = 32,
    positions: int = 256,
    expert_size: int = 24,
) -> Path:
    """A random Qwen3 (with experts: Qwen3-MoE, two a token) with norms away from 1 (a mix-up shows) and logits that are
    not flat."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "use_sliding_window": False,
    }
    if experts:
        moe = {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": expert_size,
            "norm_topk_prob": True,
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **moe))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name:
                param.add_(0.1 * torch.randn_like(param))
            else:
                param.mul_(5)
    model.save_pretrained(folder)
    return folder


def stretched(folder: Path, out: Path, yarn: YarnConfig) -> Path:
    """The model with the scaling written into its config.json."""
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | read_rope(folder, yarn).config_fields(config)))
    return out


def make_groups(count: int, *, size: int = 4, step: int = 1, seed: int = 0) -> list[TrainGroup]:
    """Ragged multi-turn trajectories: generated runs and tool outputs in turn, one member per group of advantage 0."""
    random = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    def tokens(n: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (n,), generator=random).tolist()

    groups = []
    for index in range(count):
        prompt = tokens(integer(3, 20))
        members = []
        for member in range(size):
            mask: list[int] = []
            for _ in range(integer(1, 4)):
                mask += [1] * integer(1, 9) + [0] * integer(0, 7)
            advantage = 0.0 if member == 0 else float(torch.randn((), generator=random))
            members.append(
                TrainSequence(
                    trajectory_id=f"p{index:06d}.0.{member}.0",
                    prompt_ids=prompt,
                    response_ids=tokens(len(mask)),
                    loss_mask=mask,
                    logprobs=[-4.5 * bit for bit in mask],
                    spans=[VersionSpan(start=0, end=len(mask), version=max(0, step - 1 - index % 2))],
                    advantage=advantage,
                    reward=0.0,
                )
            )
        group_id = f"p{index:06d}.0"
        groups.append(
            TrainGroup(group_id=group_id, prompt_id=f"p{index:06d}", task_id="t", step=step, sequences=members)
        )
    return groups


def counts_of(groups: Sequence[TrainGroup]) -> BatchCounts:
    sequences = [sequence for group in groups for sequence in group.sequences]
    return BatchCounts(
        groups=len(groups), sequences=len(sequences), tokens=sum(sum(sequence.loss_mask) for sequence in sequences)
    )


def start_megatron(parallel: ParallelConfig | None = None) -> Any:
    """Megatron in this process, as the only one or under torchrun; returns this process's place."""
    cpu.install()
    from megatron_venus.adapters import layout

    if not dist.is_initialized() and "RANK" not in os.environ:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return layout.join(parallel or ParallelConfig())


def make_actor(
    folder: Path,
    optimizer: OptimizerConfig | None = None,
    *,
    dtype: str = "float32",
    parallel: ParallelConfig | None = None,
    yarn: YarnConfig | None = None,
    megatron: Path | None = None,
) -> Any:
    place = start_megatron(parallel)
    from megatron_venus import architecture, checkpoint, hf_folder
    from megatron_venus.adapters.megatron import Actor

    arch = architecture.read_architecture(folder)
    weights: Any = hf_folder.read_weights(folder)
    if megatron:
        weights = functools.partial(checkpoint.load_weights, open_checkpoint(megatron, "megatron"))
    rope = read_rope(folder, yarn or YarnConfig())
    return Actor(arch, weights, optimizer or OptimizerConfig(), place, rope=rope, dtype=dtype, seed=0)


def save_checkpoint(
    run_dir: Path, step: int, actor: Any, *, hf_source: Path, nonfinite_steps: int = 0, **config: Any
) -> None:
    """The checkpoint of `step`, complete when this returns."""
    from megatron_venus.checkpoint_saver import CheckpointSaver

    with CheckpointSaver(run_dir, actor, CheckpointConfig(**config), hf_source=hf_source) as saver:
        saver.save(step, nonfinite_steps)


def make_stream(actor: Any, **options: Any) -> Any:
    from megatron_venus.grad_stream import GradientStream

    settings = {"temperature": 1.0, "micro_batch_tokens": 4096, "skip_zero_advantage": True} | options
    optimizer = settings.pop("optimizer", OptimizerConfig())
    loss = settings.pop("loss", LossConfig())
    return GradientStream(actor, loss, optimizer, **settings)


def capture_gradient(actor: Any) -> dict[str, Tensor]:
    """Fills the returned dict with the whole reduced gradient, under Hugging Face's names, at the next `finish`."""
    captured: dict[str, Tensor] = {}
    check = actor.gradient_is_finite

    def capture() -> bool:
        for buffer in actor.buffers():
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                # The distributed optimizer leaves a process only its own part: put the parts together.
                part = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, part, group=group)
        captured.update({name: grad.clone() for name, grad in actor.hf_tensors(lambda param: param.main_grad)})
        return check()

    actor.gradient_is_finite = capture
    return captured


def reference_model(folder: Path) -> Any:
    """Plain transformers with the folder's weights.

    Not by `from_pretrained`: beside an initialised process group transformers 5.12 leaves the rotary frequencies
    uninitialised.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron_venus.hf_folder import read_weights

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    weights = read_weights(folder)
    for name, _ in model.named_parameters():
        if parts := expert_names(name, model.config):
            weights[name] = torch.stack([torch.cat([weights.pop(part) for part in expert]) for expert in parts])
    missing = model.load_state_dict(weights, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]) and not missing.unexpected_keys
    return model


def expert_names(name: str, config: Any) -> list[list[str]]:
    """For a parameter in which transformers fuses all experts: names of each expert's tensors, to be stacked."""
    stem, _, fused = name.rpartition(".")
    kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(fused, ())
    return (
        [[f"{stem}.{expert}.{kind}.weight" for kind in kinds] for expert in range(config.num_experts)] if kinds else []
    )


def gradients_of(model: Any) -> dict[str, Tensor]:
    """The gradients in a plain transformers model, under the names of its checkpoint."""
    gradients: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        if parts := expert_names(name, model.config):
            for expert, grad in zip(parts, param.grad, strict=True):
                gradients |= dict(zip(expert, grad.chunk(len(expert)), strict=True))
        else:
            gradients[name] = param.grad
    return gradients


def reference_log_probs(model: Any, sequence: TrainSequence, temperature: float = 1.0) -> Tensor:
    """log π of the loss tokens by plain transformers, one sequence at a time."""
    ids = torch.tensor([sequence.prompt_ids + sequence.response_ids])
    log_p = torch.log_softmax(model(ids).logits[0, :-1].float() / temperature, -1)
    chosen = log_p.gather(-1, ids[0, 1:, None]).squeeze(-1)[len(sequence.prompt_ids) - 1 :]
    return chosen[torch.tensor(sequence.loss_mask, dtype=torch.bool)]


def reference_gradient(folder: Path, groups: Sequence[TrainGroup], temperature: float = 1.0) -> Any:
    """The model with the whole batch's token-mean gradient in its parameters."""
    model = reference_model(folder)
    tokens = counts_of(groups).tokens
    for group in groups:
        for sequence in group.sequences:
            log_pi = reference_log_probs(model, sequence, temperature)
            ratio = (log_pi - log_pi.detach()).exp()
            (-(ratio * sequence.advantage).sum() / tokens).backward()
    return model


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


class Case(Record):
    """A batch for two replicas: replica 0 takes the groups named by `first`, in that order, replica 1 the rest.

    With one replica it takes those of `first`, then the rest.
    """

    folder: str
    groups: list[TrainGroup]
    first: list[int]
    micro_batch_tokens: int
    loss: LossConfig = msgspec.field(default_factory=LossConfig)
    advantage: AdvantageRule = AdvantageRule()
    parallel: ParallelConfig = ParallelConfig()
    """All cases of one torchrun have the same."""
    dtype: str = "float32"


def process(cases: Path, out: Path) -> None:
    results = []
    for case in msgspec.msgpack.decode(cases.read_bytes(), type=list[Case]):
        actor = make_actor(Path(case.folder), dtype=case.dtype, parallel=case.parallel)
        options: dict[str, Any] = {"loss": case.loss, "advantage": case.advantage}
        if case.loss.kl.place != "none":
            options["reference"] = FrozenReference(actor.chunks)
        stream = make_stream(actor, micro_batch_tokens=case.micro_batch_tokens, **options)
        gradient = capture_gradient(actor)
        rest = [index for index in reversed(range(len(case.groups))) if index not in case.first]
        mine = [case.first, rest][actor.layout.replica] if actor.layout.replicas == 2 else [*case.first, *rest]
        for index in mine:
            stream.add(case.groups[index])
        result = stream.finish(1, counts_of(case.groups))
        weights = {name: tensor.clone() for name, tensor in actor.hf_tensors()}
        assert_exported(actor, weights)
        results.append({"gradient": gradient, "weights": weights, "metrics": result.metrics})
    if dist.get_rank() == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()


def make_export(actor: Any) -> Any:
    from megatron_venus.adapters.export import WeightExport

    return WeightExport(actor)


def assert_exported(actor: Any, weights: dict[str, Tensor]) -> None:
    """What rank 0 reads for a weight sync is, to the bit, what is gathered for a checkpoint; in any parts."""
    export = make_export(actor)
    if actor.layout.replica == 0 and actor.layout.head:
        assert {info.name for info in export.infos} == weights.keys()
        found = [torch.full(info.shape, torch.nan, dtype=info.dtype) for info in export.infos]
        export.read(range(1, len(found), 2), found[1::2])
        export.read(range(0, len(found), 2), found[::2])
        for index, (info, tensor) in enumerate(zip(export.infos, found, strict=True)):
            assert torch.equal(tensor, weights[info.name]), info.name
            assert (whole := export.whole(index)) is None or torch.equal(whole, tensor), info.name
    export.finish()


def torchrun(ranks: int, cases: Sequence[Case], folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    """Gradient, new weights and metrics of every case, trained by `ranks` processes."""
    (folder / "cases").write_bytes(msgspec.msgpack.encode(cases))
    run_module(ranks, "tests.numerics.kit", str(folder / "cases"), str(folder / "out"))
    results: list[dict[str, dict[str, Tensor]]] = torch.load(folder / "out")
    return results


def run_module(ranks: int, module: str, *arguments: str) -> str:
    """`python -m module` under torchrun; its output."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return run_python(*launcher, "-m", module, *arguments)


def run_python(*arguments: str) -> str:
    """`python …` in a process of its own; its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def assert_gradient(ours: dict[str, Tensor], reference: torch.nn.Module, tolerance: float = 1e-5) -> None:
    """‖Δ‖ / ‖reference‖ of every tensor."""
    gradients = gradients_of(reference)
    assert set(ours) == set(gradients)
    for name, gradient in gradients.items():
        assert relative_error(ours[name], gradient) <= tolerance, name


if __name__ == "__main__":
    torch.set_num_threads(1)
    process(Path(sys.argv[1]), Path(sys.argv[2]))
