"""`reward.png`: training reward and held-out pass over the steps, from a run's own files."""

from __future__ import annotations

from pathlib import Path

from envclient.base.files import read_jsonl


def plot_reward(run_dir: Path) -> Path | None:
    """Draw `reward.png` in `run_dir` from metrics.jsonl and evals.jsonl; None when there is nothing to draw yet."""
    steps = read_jsonl(run_dir / "metrics.jsonl")
    evals = read_jsonl(run_dir / "evals.jsonl")
    if not steps:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=130)
    axes.plot(
        [r["step"] for r in steps], [r["reward/mean"] for r in steps], color="0.6", label="training reward (T = 1)"
    )
    if evals:
        axes.errorbar(
            [r["step"] for r in evals],
            [r["pass"] for r in evals],
            yerr=[r["standard_error"] for r in evals],
            fmt="o-",
            capsize=4,
            label="held-out pass (T = 1, ± standard error)",
        )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("fraction solved")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    axes.set_title(run_dir.name)
    figure.tight_layout()
    target = run_dir / "reward.png"
    figure.savefig(target)
    pyplot.close(figure)
    return target
