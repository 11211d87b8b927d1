#!/bin/sh
# Install what the test cluster needs, on Debian or Ubuntu as root; nothing to do when all of it is there.
set -eu
here=$(dirname "$0")

missing=""
while read -r package; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing="$missing $package"
done < "$here/packages.txt"
if [ -z "$missing" ]; then
    exit 0
fi
if [ "$(id -u)" != 0 ]; then
    echo "install.sh: not root; install these packages first:$missing" >&2
    exit 1
fi

# The packages' own services must not start, neither now nor at the next boot: the cluster runs its daemons itself.
# policy-rc.d is Debian's way to say so (101: action forbidden by policy); an existing one is left as it is.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod 755 "$policy"
fi

export DEBIAN_FRONTEND=noninteractive
# The package lists may be too old, or absent from an image: then fetch them and try again.
# shellcheck disable=SC2086  # one word for each package
apt-get install -y -q --no-install-recommends $missing || {
    apt-get update -q
    apt-get install -y -q --no-install-recommends $missing
}

if command -v systemctl > /dev/null; then
    for package in $missing; do
        for unit in $(dpkg -L "$package" | sed -n 's|.*/systemd/system/\([^/@]*\.service\)$|\1|p'); do
            systemctl --quiet disable "$unit"
        done
    done
fi
