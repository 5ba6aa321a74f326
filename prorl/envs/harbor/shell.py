"""What the `harbor` env runs inside its sandboxes, as bash, as root of the image.

The workspace holds files of ours in OURS, which an agent may break: then there is nothing to score.
"""

from __future__ import annotations

OURS = "/workspace/.prorl"
CHANGES = ".prorl/changes.tar.gz"
MAX_CHANGES_BYTES = 1 << 20
TOO_LARGE = 4
REWARD = ".prorl/reward"

GO = (
    '[ -n "$PRORL_WORKDIR" ] || { export PRORL_WORKDIR="$(cat /.prorl-workdir)";'
    ' cd "$PRORL_WORKDIR"; } 2> /dev/null\n'
    "export TAR_OPTIONS=--no-same-owner\n"
)
"""Before each command: a shell's first one begins in the image's WORKDIR. Its root has one user to
give files to, so archives of other people's files are unpacked as its own.
"""

SYSTEM = ("proc", "sys", "dev", "usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
OTHERS = ("opt/prorl", "tests", "logs", "solution", "workspace/.prorl", ".singularity.d", "tmp")
"""Folders whose changes do not count: the system's, and the verifier's."""

_PRUNED = " -o ".join(f"-path /{name}" for name in (*SYSTEM, *OTHERS))
_FILES = rf"find / \( {_PRUNED} \) -prune -o \( -type f -o -type l \)"

START = f"""
mkdir -p {OURS}
{_FILES} -print0 2> /dev/null | LC_ALL=C sort -z > {OURS}/before
cat /.prorl-workdir 2> /dev/null || echo /
sleep 0.02
touch {OURS}/start
"""
"""Prints the image's WORKDIR."""

COLLECT = f"""
set -e
cd /
{_FILES} -cnewer {OURS}/start -print0 2> /dev/null > {OURS}/new || true
{_FILES} -print0 2> /dev/null | LC_ALL=C sort -z > {OURS}/after || true
LC_ALL=C comm -z -23 {OURS}/before {OURS}/after > {OURS}/removed
sed -z 's#^/##' {OURS}/new > {OURS}/names
tar -czf /workspace/{CHANGES} --null -T {OURS}/names -C {OURS} removed
[ "$(stat -c %s /workspace/{CHANGES})" -le {MAX_CHANGES_BYTES} ] || exit {TOO_LARGE}
"""

RESTORE = f"""
set -e
cd /
tar -xzf /workspace/{CHANGES} --no-same-owner --exclude=removed
tar -xzf /workspace/{CHANGES} -C {OURS} removed
while IFS= read -r -d '' path; do rm -f -- "$path"; done < {OURS}/removed
"""

STAND_INS = {
    "apt-get": 'echo "offline: $0 $*"\n',
    "curl": 'mkdir -p "$HOME/.local/bin"; : > "$HOME/.local/bin/env"\n',
    "uv": """case "$1 $2" in
"pip install"*) exit 0 ;;
esac
case "$1" in
venv) mkdir -p "${2:-.venv}/bin"; : > "${2:-.venv}/bin/activate" ;;
run) shift; exec uvx "$@" ;;
esac
""",
    "uvx": """while [ $# -gt 0 ]; do case "$1" in
-p|--python|-w|--with|--from) shift 2 ;;
-*) shift ;;
*) break ;;
esac; done
program="$1"; shift
case "$program" in
pytest) ;;
python*) exec python3 "$@" ;;
*) exec "$program" "$@" ;;
esac
words=()
while [ $# -gt 0 ]; do case "$1" in
--ctrf) shift 2 ;;
*) words+=("$1"); shift ;;
esac; done
exec python3 -m pytest "${words[@]}"
""",
    "pip": 'case "$1" in install) exit 0 ;; *) exec python3 -m pip "$@" ;; esac\n',
}
"""What a verifier's script fetches from the net, from the image instead: pytest and its like must
be there. A package that is not is seen by the tests that import it.
"""

BRING = f"""
set -e
mkdir -p /logs/verifier /logs/agent /tests /root
find /logs/verifier /tests -mindepth 1 ! -type d -delete
cp -r {OURS}/tests/. /tests/
"""
"""Folders of the image stay, emptied: not every overlay lets one be made again that it had."""

TEST = f"""
export TEST_DIR=/tests TAR_OPTIONS=--no-same-owner PATH={OURS}/bin:$PATH HOME=/root
cd "$(cat /.prorl-workdir 2> /dev/null || echo /)"
bash {{test}} < /dev/null
code=$?
for each in /logs/verifier/reward.txt /logs/verifier/reward.json; do
  [ -f $each ] && cat $each > /workspace/{REWARD} && break
done
exit $code
"""
"""`{test}`: the script of the tests."""
