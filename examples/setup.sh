# Sourced by examples/quickstart.sh and tests/run.sh: installs what is missing, says what it does, quick the second time.
# Sets ROOT and PYTHON. VENUS_TORCH_INDEX may name an index to take torch from (for example one with CPU builds).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="$ROOT/.venv/bin/python"
say() { printf '[setup] %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 2; }

install_system_packages() {
  local need="python3-venv python3-dev g++ bubblewrap libibverbs1 libnuma1 libcurl4 libseccomp2 iproute2" missing=() package
  command -v dpkg-query >/dev/null || { say "no dpkg here: make sure these are installed: $need"; return 0; }
  for package in $need; do
    # Newer releases renamed some libraries (libcurl4t64) for their 64-bit time_t.
    { dpkg-query -W -f='${db:Status-Status}\n' "$package" "${package}t64" 2>/dev/null || true; } | grep -qx installed \
      || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  local root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || die "Debian packages are missing: ${missing[*]} (install them as root: apt-get install ${missing[*]})"
    root=(sudo)
  fi
  say "installing Debian packages: ${missing[*]}"
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 update -q >&2 \
    && "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -y -q --no-install-recommends "${missing[@]}" >&2 \
    || die "apt-get could not install: ${missing[*]} (install them by hand, then run this again)"
}

install_python_packages() {
  local stamp wanted python
  wanted="$(cat "$ROOT/requirements.txt" "$ROOT/pyproject.toml" "$ROOT/examples/setup.sh" | sha256sum | cut -d' ' -f1) $ROOT ${VENUS_TORCH_INDEX:-}"
  stamp="$ROOT/.venv/venus-stamp"
  [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return 0
  python="${VENUS_PYTHON:-python3}"
  "$python" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info < (3, 13)))' 2>/dev/null \
    || die "$python is $("$python" --version 2>&1): Python 3.11 or 3.12 is needed (set VENUS_PYTHON to one)"
  if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then   # none yet, or an interrupted one
    say "creating .venv"
    "$python" -m venv --clear "$ROOT/.venv" || die "python3 -m venv failed (apt-get install python3-venv)"
  fi
  local torch index=()
  torch="$(grep '^torch==' "$ROOT/requirements.txt")"
  [ -n "${VENUS_TORCH_INDEX:-}" ] && index=(--index-url "$VENUS_TORCH_INDEX")
  say "installing $torch"
  "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps "${index[@]}" "$torch" >&2 || die "pip could not install $torch"
  say "installing the pinned Python packages (3 GB, a few minutes the first time)"
  grep -v '^torch==' "$ROOT/requirements.txt" > "$ROOT/.venv/requirements-rest.txt"
  "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps -r "$ROOT/.venv/requirements-rest.txt" >&2 \
    || die "pip could not install requirements.txt"
  if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
    say "this torch is a CUDA build: installing the libraries it links"   # without them it does not even import
    "$PYTHON" -m pip install -q --disable-pip-version-check "${index[@]}" "$torch" >&2 || die "pip could not install $torch with its libraries"
    "$PYTHON" -c 'import torch' || die "torch does not import (see above)"
  fi
  say "registering VenusRL's entry points"
  "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e "$ROOT" >&2 || die "pip could not install VenusRL itself"
  printf '%s' "$wanted" > "$stamp"
}

exec 9>"$ROOT/.setup.lock" && flock 9   # two set-ups of one checkout take turns
install_system_packages
install_python_packages
exec 9>&-
