"""What a path on the command line holds: a Hugging Face folder, a run's checkpoint, or a bare distributed checkpoint.

A run's checkpoint (and what `from_hf` writes) is a folder with `megatron/`, `hf/` and `manifest.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from ckpt_tools.dist_reader import CONFIG
from ckpt_tools.hf_checkpoint import HfCheckpoint
from ckpt_tools.megatron_checkpoint import MegatronCheckpoint
from envclient.base.errors import ConfigError
from megatron_venus.checkpoint_index import MANIFEST, Manifest, read_manifest

Weights = HfCheckpoint | MegatronCheckpoint


@dataclass(frozen=True, kw_only=True)
class Source:
    """Folders of one checkpoint; `root` has the manifest, if there is one."""

    root: Path
    megatron_dir: Path | None
    """Distributed checkpoint; None: a Hugging Face folder."""
    hf_dir: Path
    """Folder with config.json and tokenizer."""
    manifest: Manifest | None

    def open(self, *, any_dtype: bool = False) -> Weights:
        """The checked weights.

        Raises:
            ConfigError: see the two kinds of checkpoint.
        """
        if self.megatron_dir is None:
            return HfCheckpoint.open(self.hf_dir, any_dtype=any_dtype)
        return MegatronCheckpoint.open(self.megatron_dir, self.hf_dir)


def find(path: Path, hf_dir: Path | None = None) -> Source:
    """What is at `path`; `hf_dir` names the folder with config.json when it is not beside the distributed checkpoint.

    Raises:
        ConfigError: nothing there that is known.
    """
    if (path / "megatron" / CONFIG).is_file():
        root, megatron = path, path / "megatron"
    elif (path / CONFIG).is_file() and (path / ".metadata").is_file():
        root, megatron = path.absolute().parent, path
    elif (path / "config.json").is_file():
        root = path.absolute().parent
        return Source(
            root=root, megatron_dir=None, hf_dir=path, manifest=_manifest(root) if path.name == "hf" else None
        )
    else:
        raise ConfigError(
            f"{str(path)!r} holds no checkpoint",
            f"name a folder with config.json, with megatron/{CONFIG}, or with {CONFIG} and .metadata",
        )
    hf_dir = hf_dir or root / "hf"
    if not (hf_dir / "config.json").is_file():
        raise ConfigError(
            f"{str(hf_dir)!r} has no config.json to tell the model of {str(path)!r}",
            "--hf names a Hugging Face folder of that model",
        )
    return Source(root=root, megatron_dir=megatron, hf_dir=hf_dir, manifest=_manifest(root))


def _manifest(root: Path) -> Manifest | None:
    path = root / MANIFEST
    if not path.is_file():
        return None
    try:
        return read_manifest(root)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a manifest: {error}", "use another copy of the checkpoint") from None
