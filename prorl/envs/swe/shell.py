"""What the `swe` env runs inside its sandboxes, as bash.

All of it works on the workspace, which is the current folder.

`refs/prorl/base` is the commit that everything is compared with. An agent may break it: then there
is nothing to score. Files of our own lie in `.git`, never in /tmp, which not every kind of sandbox
has for itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

ARCHIVE = ".prorl-archive"
DIFF = ".git/prorl.diff"
PATHS = ".git/prorl.paths"
ASKED = ".git/prorl.asked"
REPORT = ".git/prorl.report"
MAX_PATCH_BYTES = 512 << 10
NO_BASE, TOO_LARGE = 3, 4
"""Exit codes of ARTEFACT."""

UNPACK_TAR = f"""
tar -xf {ARCHIVE} --no-same-owner
rm {ARCHIVE}
"""

BASE = """
find . -name .git -prune -exec rm -rf {} +
git init -q
git config user.name agent
git config user.email agent@sandbox
printf '%s\\n' .gitconfig .ipython/ .cache/ .pytest_cache/ __pycache__/ '*.pyc' > .git/info/exclude
git add -A
git commit -q --allow-empty --no-verify -m base
git update-ref refs/prorl/base HEAD
"""

ARTEFACT = f"""
export GIT_INDEX_FILE=.git/prorl.index GIT_CONFIG_GLOBAL=/dev/null GIT_LITERAL_PATHSPECS=1
git="git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.quotePath=true -c diff.noprefix=false"
rm -f $GIT_INDEX_FILE
$git read-tree refs/prorl/base || exit {NO_BASE}
# repositories inside it are folders like any other, and what its owner may not read he may allow
find . -mindepth 2 -name .git -not -path './.git/*' -prune -exec rm -rf {{}} +
find . -path ./.git -prune -o '(' -type d ! -perm -u+rwx -o -type f ! -perm -u+r ')' -exec chmod u+rwX {{}} + 2> /dev/null
$git add -A --ignore-errors
# too much for a change: new files are left out, the largest first
for limit in none 8192 1024 256 64 16 4 1; do
  if [ $limit != none ]; then
    $git diff --cached --name-only --no-renames --diff-filter=A -z refs/prorl/base > .git/prorl.new
    while IFS= read -r -d '' path; do
      [ "$(stat -c %s -- "$path" 2> /dev/null || echo 0)" -gt $((limit * 1024)) ] && printf '%s\\0' "$path"
    done < .git/prorl.new | $git update-index --force-remove -z --stdin
  fi
  $git diff --cached --binary --no-renames --no-color --no-ext-diff --no-textconv refs/prorl/base > {DIFF} || exit {NO_BASE}
  [ "$(stat -c %s {DIFF})" -le {MAX_PATCH_BYTES} ] && exit 0
done
exit {TOO_LARGE}
"""

PATHS_OF = f"git apply --numstat -z - > {PATHS}"

THERE = f"""
while IFS= read -r -d '' path; do
  if [ -e "$path" ] || [ -L "$path" ]; then printf '%s\\0' "$path"; fi
done < {ASKED} > {PATHS}
"""
"""Which of the paths in ASKED exist, into PATHS."""

CLEAR = """
chmod -R u+rwX . 2> /dev/null
find . -mindepth 1 -delete || exit 1
# what a sandbox shares with its host is not ours to clear
[ "$PWD" = /workspace ] || exit 0
find /tmp /var/tmp /dev/shm -xdev -mindepth 1 -user "$(id -u)" -delete 2> /dev/null
exit 0
"""
"""Remove what a run has left: each one begins as the first did."""

IMAGE_ENVIRONMENT = "for f in /.singularity.d/env/9*-environment.sh; do [ -r $f ] && . $f; done\n"
"""An Apptainer image's %environment, which other kinds do not read."""


def exports(environment: Mapping[str, str], image: str) -> str:
    """Lines that set a task's environment before its commands.

    >>> exports({"PYTHONPATH": "src"}, "")
    'export PYTHONPATH=src\\n'
    """
    own = "".join(f"export {name}={shlex.quote(text)}\n" for name, text in environment.items())
    return (IMAGE_ENVIRONMENT if image else "") + own
