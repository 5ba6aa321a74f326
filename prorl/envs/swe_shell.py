"""What the `swe` env runs inside its sandboxes, as bash.

All of it works on the workspace, which is the current folder.

`refs/prorl/base` is the commit that everything is compared with. An agent may break it: then there
is nothing to score. Files of our own lie in `.git`, never in /tmp, which not every kind of sandbox
has for itself.
"""

from __future__ import annotations

ARCHIVE = ".prorl-archive"
DIFF = ".git/prorl.diff"
LOG = ".git/prorl-tests.log"
TAIL = ".git/prorl-tests.tail"

UNPACK_TAR = f"""
tar -xf {ARCHIVE} --no-same-owner
rm {ARCHIVE}
"""

UNPACK_BUNDLE = f"""
git clone -q --no-checkout {ARCHIVE} .prorl-clone
git -C .prorl-clone checkout -q "${{BASE_COMMIT:-HEAD}}"
rm -rf .prorl-clone/.git {ARCHIVE}
cp -a .prorl-clone/. .
rm -rf .prorl-clone
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
set -e
export GIT_INDEX_FILE=.git/prorl.index GIT_CONFIG_GLOBAL=/dev/null
git="git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.quotePath=true -c diff.noprefix=false"
rm -f $GIT_INDEX_FILE
$git read-tree refs/prorl/base
$git add -A
$git diff --cached --binary --no-renames --no-color --no-ext-diff --no-textconv refs/prorl/base > {DIFF}
"""
