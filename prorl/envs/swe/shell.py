"""Bash scripts that the `swe` env runs inside its sandboxes.

All of it works on the workspace, which is the current folder.

`.git/prorl.base` names the commit that everything is compared with, and `refs/prorl/base` keeps it
alive. An agent may break either: then there is nothing to score. Files of our own lie in `.git`,
never in /tmp, which not every kind of sandbox has for itself.

No setting of git decides about a verdict: `ISOLATED` hides those of the system and the user, and
the artifact is made by a repository of its own (`.git/prorl.git`), which borrows the objects of the
agent's and reads none of its settings, attributes and excludes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from prorl.limits import MAX_ARTIFACT_BYTES

ARCHIVE = ".prorl-archive"
DIFF = ".git/prorl.diff"
PATHS = ".git/prorl.paths"
QUERY = ".git/prorl.asked"
REPORT = ".git/prorl.report"
TRACKED = ".prorl-tracked"
NO_BASE, TOO_LARGE = 3, 4
"""Exit codes of ARTIFACT."""

UNPACK_TAR = f"""
tar -xf {ARCHIVE} --no-same-owner
rm {ARCHIVE}
"""

LIST_FILES = f"""
[ -e .git ] || find . -name .git -prune -o '(' -type f -o -type l ')' ! -path ./{TRACKED} -print0 > {TRACKED}
"""
"""Before a setup makes further files: all that a task brings without an index is tracked."""

ISOLATED = """
unset "${!GIT_@}"
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1
export GIT_NO_REPLACE_OBJECTS=1 HOME=/nonexistent XDG_CONFIG_HOME=/nonexistent LC_ALL=C
"""
"""git as its documentation describes it, whatever the image, the task or the agent has set."""

_NESTED = """
exclude() {
  mkdir -p "$1/info"
  printf '%s\\n' .gitconfig .ipython/ .cache/ .pytest_cache/ __pycache__/ '*.pyc' .prorl-git > "$1/info/exclude"
}
# git does not look into repositories inside of the repository: they are folders like any other
hide_nested() {
  find . -path ./.git -prune -o -name .git -prune -print0 > .git/prorl.nested
  while IFS= read -r -d '' path; do mv -T "$path" "${path%.git}.prorl-git" || true; done < .git/prorl.nested
}
show_nested() {
  while IFS= read -r -d '' path; do mv -T "${path%.git}.prorl-git" "$path" || true; done < .git/prorl.nested
}
"""

_VERSION = r"""
# the version that the producer of the image saw: of the nearest tag, else of the built package
version= distance=0
described=$(git -c safe.directory='*' describe --tags --long --match '*[0-9]*' 2> /dev/null || true)
if [ -n "$described" ]; then
  version=${described%-*-*} distance=${described%-g*}
  distance=${distance##*-}
else
  for info in PKG-INFO *.egg-info/PKG-INFO */*.egg-info/PKG-INFO; do
    [ -f "$info" ] && [ -z "$version" ] && version=$(sed -n '/^Version: */{s///p;q}' "$info" | tr -d '\r ')
  done
  case $version in
    *unknown* | *untagged*) version= ;;
    *+[0-9]*.g*) distance=${version##*+} distance=${distance%%.*} version=${version%%+*} ;;
    *.dev[1-9]*) version=${version%%+*} distance=${version##*.dev} version=${version%.dev*}.dev0 ;;
  esac
  version=${version%%+*}
  version=${version:+v${version#v}}
fi
case $distance in *[!0-9]* | ?????*) distance=1 ;; esac
"""
"""setuptools_scm makes N commits behind the tag `v1.2.dev0` to 1.2.devN, and versioneer N commits
behind `v1.2` to 1.2+N.gHASH. A date in the place of N is no number of commits: then it is 1.
"""

BASE = f"""
{ISOLATED}
{_VERSION}
epoch=$(git -c safe.directory='*' log -1 --format=%ct 2> /dev/null || true)
if [ -e .git ]; then
  git -c safe.directory='*' ls-files -z --recurse-submodules >> {TRACKED} 2> /dev/null ||
    git -c safe.directory='*' ls-files -z >> {TRACKED} 2> /dev/null || true
fi
find . -mindepth 2 -path ./.git -prune -o -name .git -type d -prune -print0 | while IFS= read -r -d '' path; do
  git -c safe.directory='*' -C "${{path%.git}}" ls-files -z 2> /dev/null |
    while IFS= read -r -d '' name; do printf '%s\\0' "${{path%.git}}$name"; done
done >> {TRACKED}
# the repository of a submodule lies in the one that is removed
find . -mindepth 2 -path ./.git -prune -o -name .git -type f -print0 | while IFS= read -r -d '' path; do
  target=$(cd "${{path%.git}}" && readlink -f "$(sed -n 's/^gitdir: //p' .git)" || true)
  case $target in "$PWD"/.git/*) rm "$path" ;; esac
done
rm -rf .git
git init -q
git config user.name agent
git config user.email agent@sandbox
touch {TRACKED}
mv {TRACKED} .git/prorl.tracked
{_NESTED}
exclude .git
hide_nested
git add -A
# what upstream tracks although .gitignore names it
while IFS= read -r -d '' path; do
  if [ -L "$path" ] || [ -f "$path" ]; then printf '%s\\0' "$path"; fi
done < .git/prorl.tracked | git update-index --add -z --stdin
show_nested
export GIT_AUTHOR_DATE="@${{epoch:-$(date +%s)}} +0000"
export GIT_COMMITTER_DATE=$GIT_AUTHOR_DATE
tree=$(git write-tree) parent=()
if [ -n "$version" ] && [ "$distance" -gt 0 ]; then
  who="committer agent <agent@sandbox> ${{epoch:-$(date +%s)}} +0000"
  for ((number = 0; number < distance; number++)); do
    printf 'commit refs/prorl/history\\n%s\\ndata 19\\nhistory is left out\\n' "$who"
    [ $number -gt 0 ] || printf 'M 040000 %s ""\\n' "$tree"
  done | git fast-import --quiet
  git tag -a -m "$version" "$version" "refs/prorl/history~$((distance - 1))"
  parent=(-p refs/prorl/history)
fi
git update-ref HEAD "$(git commit-tree "${{parent[@]}}" -m base "$tree")"
git update-ref refs/prorl/base HEAD
git update-ref -d refs/prorl/history
git rev-parse HEAD > .git/prorl.base
if [ -n "$version" ] && [ "$distance" = 0 ]; then git tag -a -m "$version" "$version"; fi
"""

_SECTIONS = r"""
/^diff --git / { if (number++) print bytes, odd; bytes = odd = 0 }
/^GIT binary patch/ || length($0) > 4000 { odd = 1 }
{ bytes += length($0) + 1 }
END { if (number) print bytes, odd }
"""
"""awk: a line for each file of a diff, its bytes, and whether it is binary or minified."""

_KIND = """
# 1 generated, 2 new, 3 data, 0 what may be somebody's work
kind_of() {
  kind=0
  [ -z "${keep[$1]}" ] || return 0
  case /$1 in
    *.lock | *-lock.json | *-lock.yaml | *.lockb | *.lockfile | *.lock.json | */npm-shrinkwrap.json | */go.sum) kind=1 ;;
    *.min.* | *.bundle.js | *.map | *.snap | *_pb2.py | *.pb.go) kind=1 ;;
    */node_modules/* | */dist/* | */build/* | */target/* | */vendor/* | */__pycache__/* | *.egg-info/*) kind=1 ;;
    *) if [ "$2" = 1 ]; then kind=1; elif [ "$3" = 000000 ]; then kind=2; fi ;;
  esac
  [ $kind = 0 ] || return 0
  case $1 in *.json | *.jsonl | *.csv | *.tsv | *.xml | *.svg | *.html | *.txt | *.log | *.ipynb | *.po | *.sql) kind=3 ;; esac
}
"""

ARTIFACT = f"""
{ISOLATED}
{_NESTED}
export GIT_LITERAL_PATHSPECS=1 GIT_DIR=.git/prorl.git GIT_WORK_TREE=.
base=$(cat .git/prorl.base) || exit {NO_BASE}
rm -rf $GIT_DIR && git init -q && exclude $GIT_DIR || exit {NO_BASE}
echo ../../objects > $GIT_DIR/objects/info/alternates
git read-tree "$base" || exit {NO_BASE}
declare -A keep
asked=()
while IFS= read -r -d '' path; do [ -z "$path" ] || {{ asked+=("$path"); keep[$path]=1; }}; done
# what its owner may not read he may allow
find . -path ./.git -prune -o '(' -type d ! -perm -u+rwx -o -type f ! -perm -u+r ')' -exec chmod u+rwX {{}} + 2> /dev/null
trap show_nested EXIT
hide_nested 2> /dev/null
git add -A --ignore-errors
for path in "${{asked[@]}}"; do
  if [ -L "$path" ] || [ -f "$path" ]; then git update-index --add -- "$path" 2> /dev/null; fi
done
write() {{
  {{
    printf %s "$1"
    git diff --cached --binary --no-renames --no-color --no-ext-diff --no-textconv "$base"
  }} > {DIFF} || exit {NO_BASE}
  num_bytes=$(stat -c %s {DIFF})
}}
write ''
[ $num_bytes -gt {MAX_ARTIFACT_BYTES} ] || exit 0
# too much for a change: what is generated is left out, then new files, then data, the largest first
{_KIND}
mapfile -t sections < <(awk '{_SECTIONS}' {DIFF})
metas=() paths=() rows=() number=0
while IFS= read -r -d '' meta && IFS= read -r -d '' path; do
  read -r bytes odd <<< "${{sections[number++]}}"
  set -- ${{meta#:}}
  if [ "$5" = T ]; then
    read -r more _ <<< "${{sections[number++]}}"
    bytes=$((bytes + more))
  fi
  kind_of "$path" "$odd" "$1"
  [ $kind = 0 ] || rows+=("$kind $bytes ${{#paths[@]}}")
  metas+=("$1 $3") paths+=("$path")
done < <(git diff --cached --raw --no-abbrev --no-renames -z "$base")
names=('' generated new data) shown= num_out=0
num_bytes=$((num_bytes + 4096))
: > .git/prorl.out
while [ $num_bytes -gt {MAX_ARTIFACT_BYTES} ] && read -r kind bytes number && [ -n "$number" ]; do
  printf '%s\\t%s\\0' "${{metas[number]}}" "${{paths[number]}}" >> .git/prorl.out
  num_bytes=$((num_bytes - bytes)) num_out=$((num_out + 1))
  [ $num_out -gt 10 ] || shown="$shown, $(printf %.200q "${{paths[number]}}") ($bytes bytes, ${{names[kind]}})"
done < <(printf '%s\\n' "${{rows[@]}}" | sort -k1,1n -k2,2nr)
git update-index -z --index-info < .git/prorl.out
[ $num_out -le 10 ] || shown="$shown and $((num_out - 10)) more"
write "left out of the artifact, which has at most {MAX_ARTIFACT_BYTES} bytes: ${{shown#, }}"$'\\n'
[ $num_bytes -gt {MAX_ARTIFACT_BYTES} ] && exit {TOO_LARGE}
exit 0
"""
"""The diff to the base commit into DIFF; standard input: paths that count even where .gitignore
names them, each with a NUL behind.
"""

APPLY = f'{ISOLATED}exec git apply "$@"'

PATHS_OF = f"{ISOLATED}git apply --numstat -z - > {PATHS}"

THERE = f"""
while IFS= read -r -d '' path; do
  if [ -e "$path" ] || [ -L "$path" ]; then printf '%s\\0' "$path"; fi
done < {QUERY} > {PATHS}
"""
"""A script that finds which of the paths in QUERY exist, into PATHS."""

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
