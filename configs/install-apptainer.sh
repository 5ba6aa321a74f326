#!/usr/bin/env bash
# bash configs/install-apptainer.sh    (as root, on Debian 12: real Apptainer, which provides `singularity`)
#
# Debian 12 has no Apptainer package. The one in Debian unstable wants a newer libc, and upgrading libc for one program would
# turn the machine into a mix. So that package is unpacked, not installed, and its two executables get a private libc beside
# them: dpkg's state stays clean, and the rootless (user namespace) way of running, which is the one of HPC sites, is what works.
# Only the Debian mirror that this machine already uses is asked. Idempotent.
set -euo pipefail

libc_dir=/opt/apptainer-libc
helpers=(squashfs-tools squashfuse fuse-overlayfs fuse3 fuse2fs uidmap patchelf)

if command -v apptainer >/dev/null && apptainer --version; then exit 0; fi
if [ "$(id -u)" != 0 ]; then echo "install-apptainer: run as root" >&2; exit 1; fi
sources=/etc/apt/sources.list.d/debian.sources
if [ ! -r "$sources" ]; then echo "install-apptainer: no $sources; this recipe is for Debian 12" >&2; exit 1; fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"

echo "install-apptainer: helpers from the configured release"
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${helpers[@]}" >/dev/null

# The configured mirror once more, with the suite changed, in an apt state of its own.
mkdir -p "$work/sources" "$work/lists/partial" "$work/cache/archives/partial" "$work/apptainer" "$work/libc"
awk 'NF == 0 {exit} {print}' "$sources" | sed -E 's/^Suites:.*/Suites: sid/' >"$work/sources/unstable.sources"
unstable() {
    apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$work/sources" \
        -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root "$@"
}
echo "install-apptainer: apptainer and its libc from unstable, unpacked"
unstable update
(cd "$work" && unstable download apptainer libc6)
dpkg -x "$work"/apptainer_*.deb "$work/apptainer"
dpkg -x "$work"/libc6_*.deb "$work/libc"

install -d "$libc_dir"
find "$work/libc/usr/lib" -maxdepth 2 -type f \( -name 'lib*.so.*' -o -name 'ld-linux*' \) -exec cp -a -t "$libc_dir" {} +
loader=$(basename "$(find "$libc_dir" -name 'ld-linux*' | head -1)")
while read -r program; do
    patchelf --set-interpreter "$libc_dir/$loader" --force-rpath --set-rpath "$libc_dir" "$program"
done < <(find "$work/apptainer/usr" -type f \( -path '*/bin/apptainer' -o -path '*/apptainer/bin/starter' \))
for folder in etc usr/bin usr/lib var; do
    if [ -d "$work/apptainer/$folder" ]; then cp -a "$work/apptainer/$folder/." "/$folder/"; fi
done
ln -sfn apptainer /usr/bin/singularity
# What udev sets on ordinary machines: lets an ordinary user mount .sif images.
if [ -e /dev/fuse ]; then chmod 0666 /dev/fuse; fi

apptainer --version
