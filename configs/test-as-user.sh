#!/usr/bin/env bash
# bash configs/test-as-user.sh [pytest arguments]      (as root, after `make setup`: runs tests as an ordinary user, as HPC nodes do)
#
# Root has a uid of its own for each sandbox and control groups; an ordinary user has neither, so other code runs. The tests see a copy of
# this tree in the home of a user made for it, and this .venv; where its Python lies in a private home, a mount namespace shows it.
set -euo pipefail
cd "$(dirname "$0")/.."
user=prorl-test
[ "$(id -u)" = 0 ] || { echo "test-as-user: run as root (an ordinary user runs make test)" >&2; exit 1; }
[ $# -gt 0 ] || set -- tests/sandbox tests/tools tests/security tests/integration
id "$user" >/dev/null 2>&1 || useradd --create-home "$user"
tree=$(getent passwd "$user" | cut -d: -f6)/prorl
rm -rf "$tree"
mkdir "$tree"
git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- --create --ignore-failed-read | tar --extract --directory "$tree"
chown -R "$user" "$tree"
exec .venv/bin/python - "$user" "$tree" "$@" <<'PYTHON'
import os, pwd, sys
from prorl.linux import calls as linux
from prorl.sandbox.kinds.common import show_interpreter

name, tree, *arguments = sys.argv[1:]
user = pwd.getpwnam(name)
linux.unshare(linux.CLONE_NEWNS)
linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
show_interpreter()
os.initgroups(name, user.pw_gid)
os.setgid(user.pw_gid)
os.setuid(user.pw_uid)
os.chdir(tree)
kept = {key: value for key, value in os.environ.items() if key.startswith("PRORL_") or key == "OMP_NUM_THREADS"}
environment = {"OMP_NUM_THREADS": "1", **kept, "HOME": user.pw_dir, "USER": name, "PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": tree}
os.execve(sys.executable, [sys.executable, "-m", "pytest", "-q", *arguments], environment)
PYTHON
