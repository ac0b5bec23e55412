# Shared by scripts/demo, scripts/container and scripts/test: sourced, not run. Leaves the caller in the repository's root.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
mkdir -p build/logs

say() { printf '== %s\n' "$*"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# quietly LOG COMMAND...: the output goes to build/logs/LOG.log, and its end is shown only when the command fails.
quietly() {
  local log=build/logs/$1.log
  shift
  "$@" >"$log" 2>&1 </dev/null && return
  tail -n 60 "$log" >&2
  printf 'this was the end of %s\n' "$log" >&2
  return 1
}

# listed KIND PURPOSE...: the packages of that kind (deb, pip) listed for any of the purposes.
listed() {
  local kind=$1
  shift
  awk -v kind="$kind" -v purposes=" $* " '$2 == kind && index(purposes, " " $1 " ") { print $3 }' scripts/packages.txt
}

as_root() {
  if ((EUID == 0)); then
    env DEBIAN_FRONTEND=noninteractive "$@"
  else
    sudo env DEBIAN_FRONTEND=noninteractive "$@"
  fi
}

install_debs() {
  local name missing=()
  for name in $(listed deb "$@"); do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null) == installed ]] || missing+=("$name")
  done
  ((${#missing[@]})) || return 0

  say "installing Debian packages: ${missing[*]}"
  ((EUID == 0)) || command -v sudo >/dev/null ||
    die "neither root nor sudo. Have root run: apt-get install --no-install-recommends ${missing[*]}"
  quietly apt-update as_root apt-get update || say "going on with the package lists that are there"
  quietly apt-install as_root apt-get install --option Acquire::Retries=3 --yes --no-install-recommends "${missing[@]}"
}

install_pips() {
  local names
  mapfile -t names < <(listed pip "$@")
  ((${#names[@]})) || return 0

  [[ -x .venv/bin/pip ]] || quietly venv /usr/bin/python3 -m venv .venv
  [[ -z $(comm -23 <(printf '%s\n' "${names[@]}" | sort) <(.venv/bin/pip freeze --all | tr "[:upper:]" "[:lower:]" | sort)) ]] && return
  say "installing Python packages into .venv: ${names[*]}"
  quietly pip-install .venv/bin/pip install "${names[@]}"
}

# install_packages PURPOSE...
install_packages() {
  command -v dpkg-query >/dev/null || die "this script installs Debian packages and needs a Debian system"
  install_debs "$@"
  install_pips "$@"
}
