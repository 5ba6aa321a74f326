#!/usr/bin/env bash
# Sees to the system packages that further kinds of sandbox and `prorl image build debian:SUITE` use: installs what is absent when run as root on Debian or Ubuntu, else says
# what is missing. Never fails: prorl goes on with the kind of sandbox that works (`prorl doctor` shows which).
set -u
declare -A package=([newuidmap]=uidmap [mmdebstrap]=mmdebstrap)
missing=()
for program in "${!package[@]}"; do command -v "$program" >/dev/null 2>&1 || missing+=("${package[$program]}"); done
if ((${#missing[@]})); then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}"; } >/dev/null 2>&1 ||
      echo "system: could not install ${missing[*]}; going on without" >&2
  else
    echo "system: going on without ${missing[*]}, for further kinds of sandbox; as root: apt-get install ${missing[*]}" >&2
  fi
fi
if ! command -v singularity >/dev/null 2>&1; then
  installer="$(dirname "$0")/install-apptainer.sh"
  if [ "$(id -u)" = 0 ] && [ -f "$installer" ] && command -v apt-get >/dev/null 2>&1; then
    bash "$installer" >/dev/null 2>&1 || echo "system: could not install Apptainer ($installer); going on without" >&2
  else
    echo "system: going on without Apptainer, a further kind of sandbox; as root on Debian 12: bash $installer" >&2
  fi
fi
exit 0
