"""Which checkpoints a run has. No torch here: the launcher reads it before anything heavy starts.

A checkpoint is the folder `checkpoints/step_000010/` with `megatron/` (distributed checkpoint), `hf/` (config and
tokenizer, and where the run exports the same weights for engines) and `manifest.json`, written last and fsynced: a
folder without a whole manifest is not a checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from envclient.base.errors import ConfigError
from envclient.base.files import write_atomic

MANIFEST = "manifest.json"
SCHEMA = 2
"""2: checksums are XXH3."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ties a step's weights, optimizer and ledger together."""

    step: int
    """Optimizer steps made; also the weight version. The ledger undoes whatever was consumed after it."""
    weights: dict[str, str]
    """Hugging Face tensor name → checksum of its raw bytes."""
    files: dict[str, int]
    """Path relative to the checkpoint's folder → size in bytes; all of them must be there."""
    schema: int = SCHEMA


class _Head(msgspec.Struct):
    """What every release's manifest has."""

    schema: int = 1


class OtherRelease(ConfigError):
    """A checkpoint that another release made: whole, but not for this one. Nobody may take it for an unfinished one."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def hf_dir(self) -> Path:
        """Folder with config and tokenizer; `exported`: one that an engine can load."""
        return self.path / "hf"

    @property
    def exported(self) -> bool:
        """Whether `hf_dir` holds the weights too."""
        return any(name.startswith("hf/") and name.endswith(".safetensors") for name in self.manifest.files)

    @property
    def megatron_dir(self) -> Path:
        """Megatron's distributed checkpoint."""
        return self.path / "megatron"


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` lives."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Complete the checkpoint in folder `path`: the last write, durable when this returns."""
    write_atomic(path / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_manifest(path: Path) -> Manifest:
    """The manifest in folder `path`.

    Raises:
        OtherRelease: its schema is another one.
        msgspec.DecodeError: it is no manifest.
    """
    raw = (path / MANIFEST).read_bytes()
    schema = msgspec.json.decode(raw, type=_Head).schema
    if schema != SCHEMA:
        raise OtherRelease(
            f"checkpoint {str(path)!r} was made by another release (schema {schema}, this one reads {SCHEMA})",
            "go on with that release, or with its export in hf/: in a run of another name, or by ckpt_tools.from_hf",
        )
    return msgspec.json.decode(raw, type=Manifest)


def open_checkpoint(path: Path, option: str) -> Checkpoint:
    """The checkpoint in folder `path`, which the user named by `option`.

    Raises:
        ConfigError: not complete; names the file that is missing, truncated or no manifest.
        OtherRelease: another release made it.
    """

    def refuse(what: str) -> ConfigError:
        return ConfigError(f"{option}={str(path)!r} is not a complete checkpoint: {what}", "name one that is whole")

    try:
        manifest = read_manifest(path)
    except OSError:
        raise refuse(f"it has no {MANIFEST}") from None
    except msgspec.DecodeError as error:
        raise refuse(f"its {MANIFEST} cannot be read: {error}") from None
    for name, size in manifest.files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            raise refuse(f"{name} is missing") from None
        if found != size:
            raise refuse(f"{name} has {found} of {size} bytes")
    return Checkpoint(path=path, manifest=manifest)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint in folder `path`, or None when it is not complete.

    Raises:
        OtherRelease: another release made it.
    """
    try:
        return open_checkpoint(path, "folder")
    except OtherRelease:
        raise
    except ConfigError:
        return None


def find_all(run_dir: Path) -> list[Checkpoint]:
    """The complete checkpoints of a run, oldest first."""
    folders = sorted((run_dir / "checkpoints").glob("step_*"))
    return [found for folder in folders if (found := read_checkpoint(folder))]


def find_latest(run_dir: Path) -> Checkpoint | None:
    """The newest complete checkpoint of a run, or None."""
    found = find_all(run_dir)
    return found[-1] if found else None


def latest_of(run_dir: Path) -> Checkpoint:
    """The newest complete checkpoint of a run that has one."""
    found = find_latest(run_dir)
    assert found is not None
    return found


def remove_unfinished(run_dir: Path) -> list[str]:
    """Remove what saves that a kill interrupted left behind; the folders' names. Not while a save is in flight."""
    folders = [path for path in (run_dir / "checkpoints").glob("step_*") if not (path / MANIFEST).exists()]
    for folder in folders:
        shutil.rmtree(folder)
    return sorted(folder.name for folder in folders)
