"""The PyPI libraries whose functions become repair tasks: pinned, checked, fetched once, never committed.

`root(library)` is the unpacked source distribution in the cache folder. pip brings it through its ordinary
configuration (index, mirror, proxy); its SHA-256 is checked here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from envclient.base.errors import ConfigError, PreflightError

CACHE_VARIABLE = "VENUS_CACHE"
DOWNLOAD_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One pinned source distribution and how its tests are collected."""

    name: str
    """Distribution name."""
    version: str
    repo: str
    """Where it is developed, as SWE-bench's `repo`."""
    package: str
    """Import package, also the folder of its sources in the archive."""
    tests: tuple[str, ...]
    """pytest arguments, relative to the archive's root."""
    sha256: str
    import_mode: str = "prepend"
    """pytest's --import-mode."""

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.version}"


LIBRARIES: dict[str, Library] = {
    library.name: library
    for library in (
        Library(
            name="toolz",
            version="1.0.0",
            repo="pytoolz/toolz",
            package="toolz",
            tests=tuple(f"toolz/tests/test_{part}.py" for part in ("itertoolz", "functoolz", "dicttoolz", "recipes")),
            sha256="2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02",
        ),
        Library(
            name="more-itertools",
            version="10.5.0",
            repo="more-itertools/more-itertools",
            package="more_itertools",
            tests=("tests",),
            sha256="5482bfef7849c25dc3c6dd53a6173ae4795da2a41a80faea6700d9f5846c5da6",
        ),
        Library(
            name="boltons",
            version="24.1.0",
            repo="mahmoud/boltons",
            package="boltons",
            tests=("tests",),
            sha256="4a49b7d57ee055b83a458c8682a2a6f199d263a8aa517098bda9bab813554b87",
            import_mode="importlib",
        ),
        Library(
            name="funcy",
            version="2.0",
            repo="Suor/funcy",
            package="funcy",
            tests=("tests",),
            sha256="3963315d59d41c6f30c04bc910e10ab50a3ac4a225868bfa96feed133df075cb",
        ),
    )
}


def library_named(name: str) -> Library:
    """Raises: ConfigError for a library that is not pinned here."""
    if name not in LIBRARIES:
        raise ConfigError(f"library {name!r} is unknown", f"known: {', '.join(LIBRARIES)}")
    return LIBRARIES[name]


def cache_folder() -> Path:
    """Where unpacked libraries are kept: `.cache/tasks` of the checkout, or of $VENUS_CACHE."""
    named = os.environ.get(CACHE_VARIABLE, "")
    return (Path(named) if named else Path(__file__).parents[2] / ".cache") / "tasks"


def root(library: Library) -> Path:
    """Folder of the unpacked source distribution, fetched first if it is not there.

    Raises:
        PreflightError: pip could not bring it, or what it brought is not the pinned file.
    """
    final = cache_folder() / library.folder
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(final.parent), tempfile.TemporaryDirectory(dir=final.parent, prefix=".fetch-") as folder:
            if not final.is_dir():
                os.replace(_unpack(library, _download(library, Path(folder)), Path(folder)), final)
    except OSError as error:
        raise PreflightError(
            f"cannot unpack {library.folder} into {final.parent}: {error.strerror or error}",
            f"make room there, or name another folder in {CACHE_VARIABLE}",
        ) from None
    return final


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Several roles may start at once; one of them downloads."""
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(library: Library, folder: Path) -> Path:
    """The source distribution's archive, checked."""
    wanted = f"{library.name}=={library.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # Not ":all:": the library comes as a source distribution, its build backend (read for metadata) may be a wheel.
    command += ["--no-binary", library.name, "--dest", str(folder), wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise PreflightError(
            f"pip did not bring {wanted} within {DOWNLOAD_TIMEOUT_S} s", "check the network and pip's index"
        ) from None
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode != 0 or len(archives) != 1:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()[-1:]
        raise PreflightError(
            f"pip could not bring {wanted}: {lines[0].strip() if lines else 'no archive'}",
            "the repair tasks need these sources once: check the network and pip's index",
        )
    check_archive(library, archives[0])
    return archives[0]


def check_archive(library: Library, archive: Path) -> None:
    """Raises: PreflightError when `archive` is not the pinned file."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != library.sha256:
        raise PreflightError(
            f"{archive.name} has SHA-256 {digest}, expected {library.sha256}",
            "the index serves another file: use PyPI or a faithful mirror",
        )


def _unpack(library: Library, archive: Path, folder: Path) -> Path:
    """The archive's only top folder, readable by the sandboxes' users."""
    target = folder / "unpacked"
    with tarfile.open(archive) as tar:
        # Python 3.11 before 3.11.4 (Debian 12's) knows no filter; the digest has vouched for the archive.
        tar.extractall(target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = target.iterdir()
    if not (source / library.package).is_dir():
        raise PreflightError(f"{archive.name} holds no folder {library.package!r}", "mend examples/tasks/libraries.py")
    for path in [source, *source.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    shutil.rmtree(source / ".git", ignore_errors=True)
    return source
