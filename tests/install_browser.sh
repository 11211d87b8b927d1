#!/bin/sh
# Install the browser that tests look at pages with, on Debian as root; nothing to do where there is one.
set -eu
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name" > /dev/null && command -v chromedriver > /dev/null; then
        exit 0
    fi
done
if [ "$(id -u)" != 0 ]; then
    echo "install_browser.sh: not root; install chromium and chromedriver first" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# A machine that has just started may be upgrading itself.
apt="apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3"
$apt install -y --no-install-recommends chromium chromium-driver || {
    $apt update
    $apt install -y --no-install-recommends chromium chromium-driver
} || echo "install_browser.sh: no packages chromium and chromium-driver; any Chrome with its chromedriver on the PATH will do" >&2
