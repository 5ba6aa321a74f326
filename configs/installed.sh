#!/bin/bash
# Plays the wheel of `make dist` in empty environments: configs/installed.sh PYTHON...
# In each: the client alone, then the extra `serve` with the highest versions that it allows and with the lowest (uv), a run of scripts
# from `prorl new` to `prorl backup`. UV names uv.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(echo "$here"/dist/prorl-*.whl)
uv=${UV:-$here/.venv-dist/bin/uv}
folder=$(mktemp -d /tmp/installed.XXXXXX)
trap 'rm -rf "$folder"' EXIT
# Neither this tree nor a set-up of the caller may stand in for a file that the wheel lacks.
unset PYTHONPATH PYTHONHOME
cd "$folder"

play() { # the commands of an environment's prorl: tasks, a run, what reads it
  local bin=$1/bin
  rm -rf capitals runs copy
  "$bin/prorl" doctor
  "$bin/prorl" new env capitals
  "$bin/prorl" check capitals/tasks.jsonl
  "$bin/prorl" run --tasks capitals/tasks.jsonl --policy flaky --n 4 --root runs
  test "$("$bin/prorl" sql runs/tasks-flaky-1 'select count(*) from rollouts' | tail -1)" = 8
  "$bin/prorl" show runs/tasks-flaky-1
  "$bin/prorl" report runs/tasks-flaky-1
  "$bin/prorl" backup copy --root runs
  "$bin/prorl" verify copy/tasks-flaky-1
  ! grep -l Traceback runs/logs/*
}

for python in "$@"; do
  for versions in highest lowest; do
    venv=$folder/venv
    "$uv" venv --quiet --clear --python "$python" "$venv"
    export VIRTUAL_ENV=$venv
    pick=$([ $versions = highest ] && echo highest || echo lowest-direct)
    echo "== $("$venv/bin/python" --version), $versions versions"
    # lowest-direct is about what is named here, so the wheel's own requirements are
    requirements() { "$uv" pip compile --quiet --no-header --no-annotate --only-binary :all: --python "$venv/bin/python" --resolution "$pick" "$@" "$here/pyproject.toml"; }
    requirements >client.txt
    "$uv" pip install --quiet -r client.txt
    "$uv" pip install --quiet --no-deps "$wheel"
    "$uv" pip check
    "$venv/bin/python" -W error -c 'import prorl, prorl.client.packed, prorl.client.http; prorl.Client, prorl.connect, prorl.load_tasks'
    requirements --extra serve >serve.txt
    "$uv" pip install --quiet -r serve.txt
    "$uv" pip check
    play "$venv" >play.log 2>&1 || { cat play.log; echo "error: $python, $versions versions: the wheel does not play"; exit 1; }
  done
done
