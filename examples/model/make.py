"""`python -m examples.model.make`: makes the shipped tokenizer and warmed-up model again, from nothing.

Needs neither network nor tasks: its corpus is the standard library of the running Python. About five minutes on one
free core. `--only-tokenizer` stops after a few seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig

from envclient.base.errors import ConfigError, main_guard
from envclient.base.files import write_json_atomic
from examples.agents.dialogue import Tool
from examples.model import tokenizer as tokenizer_module
from examples.model.demonstrations import standard_library
from examples.model.warmup import Progress, Recipe, warm_up

DEFAULT_FOLDER = Path(__file__).parent.parent / "models" / "tiny-qwen3-repair"


def _arguments(argv: list[str]) -> argparse.Namespace:
    recipe = Recipe()
    parser = argparse.ArgumentParser(prog="python -m examples.model.make", description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER, help="folder to write")
    parser.add_argument("--tool", choices=[tool.value for tool in Tool], default=recipe.tool.value)
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--steps", type=int, default=recipe.steps)
    parser.add_argument("--only-tokenizer", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps} is not positive", "the shipped model has the default")
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    corpus = standard_library()
    tokenizer_module.save(tokenizer_module.train(corpus), out)
    print(f"tokenizer: {len(corpus)} functions of the standard library -> {out}", flush=True)
    if arguments.only_tokenizer:
        return 0
    tokenizer = AutoTokenizer.from_pretrained(str(out))
    recipe = Recipe(seed=arguments.seed, tool=Tool(arguments.tool), steps=arguments.steps)
    started = time.monotonic()

    def report(progress: Progress) -> None:
        rate = progress.tokens / (time.monotonic() - started)
        print(
            f"step {progress.step}/{recipe.steps}  {progress.tokens / 1e6:.2f}M tokens  {rate:.0f} tokens/s  "
            f"loss: assistant {progress.assistant_loss:.3f}  observations {progress.observation_loss:.3f}",
            flush=True,
        )

    model = warm_up(recipe, corpus, tokenizer, report)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(str(out), safe_serialization=True)
    write_json_atomic(
        out / "recipe.json",
        {
            "seed": recipe.seed,
            "tool": recipe.tool.value,
            "steps": recipe.steps,
            "python": sys.version.split()[0],
            "functions": len(corpus),
        },
    )
    print(json.dumps({"folder": str(out), "parameters": sum(p.numel() for p in model.parameters())}))
    return 0


if __name__ == "__main__":
    main_guard(main)
