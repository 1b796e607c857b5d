"""A copy of the simulator, compiled by mypyc: the same results to the last bit, in about half the time.

For studies of thousands of runs. The copy holds the packages `rollout` and `envclient` as they are; the modules that a
simulated second is spent in get an extension module beside their source. Needs mypy and a C compiler.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from envclient.base.errors import ConfigError

MODULES = (
    *(f"rollout/sim/{name}.py" for name in ("clock", "kv", "engine", "worker", "cluster", "cost", "sandboxes")),
    "rollout/sim/trainer.py",
    *(f"rollout/policy/{name}.py" for name in ("jobs", "slots", "critical", "working_set", "lengths", "base")),
    *(f"rollout/policy/{name}.py" for name in ("grouped", "venus", "paper", "program_aware", "program_load")),
    *(f"rollout/policy/{name}.py" for name in ("predictions", "staleness", "gate", "hand_out", "settings", "tiers")),
    *(f"rollout/dispatcher/{name}.py" for name in ("schedule", "pool", "machine", "groups", "batch", "sync")),
)
_BUILD = """
import sys
from setuptools import setup
from mypyc.build import mypycify
extensions = mypycify([*sys.argv[1:]], opt_level="1", debug_level="0", multi_file=True)
setup(name="simulator", packages=[], ext_modules=extensions, script_args=["-q", "build_ext", "--inplace"])
"""
_DONE = "compiled"
_LIMIT_S = 900.0


def compiled_copy(folder: Path) -> Path:
    """Make the copy in `folder`, unless a complete one is there. To import from it, put it first on `sys.path`.

    Raises:
        ConfigError: no mypy, no C compiler, or the build failed.
    """
    if (folder / _DONE).is_file():
        return folder
    if importlib.util.find_spec("mypyc") is None:
        raise ConfigError("--compile needs mypy, which is not installed", "pip install mypy, or leave --compile out")
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        raise ConfigError("--compile needs a C compiler", "apt-get install gcc, or leave --compile out")
    root = Path(__file__).resolve().parents[2]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for package in ("rollout", "envclient"):
        shutil.copytree(root / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    settings = root / "pyproject.toml"
    flags = ["--config-file", str(settings)] if settings.is_file() else []
    command = [sys.executable, "-c", _BUILD, *flags, *MODULES]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if built.returncode != 0:
        last = (built.stdout + built.stderr).strip().splitlines()[-1:]
        raise ConfigError(f"--compile: mypyc failed: {' '.join(last)}", "leave --compile out")
    (folder / _DONE).touch()
    return folder
