#!/bin/sh
# Golden tests on emulated 64-bit ARM (`make test-arm`): Debian's arm64 Python under qemu-user, wheels for aarch64, the
# kernel cross-compiled. Everything is kept in .arm/ (1 GB). Left out: tests that start processes, which would need the
# emulator registered with the system.
set -eu
cd "$(dirname "$0")/.."

ARM=$PWD/.arm
ROOT=$ARM/root
PYTHON=$ROOT/usr/bin/python3.11
TORCH=2.10.0 # the oldest that is supported; later wheels for aarch64 need CUDA's libraries

for tool in mmdebstrap qemu-aarch64 aarch64-linux-gnu-gcc; do
    command -v "$tool" >/dev/null || {
        echo "make test-arm: expected $tool, found none: apt-get install mmdebstrap qemu-user gcc-aarch64-linux-gnu" >&2
        exit 2
    }
done

if [ ! -e "$PYTHON" ]; then
    mkdir -p "$ARM"
    rm -rf "$ROOT"
    mmdebstrap --quiet --variant=extract --architectures=arm64 \
        --include=python3,libpython3-dev,libstdc++6 bookworm "$ROOT"
fi

if [ ! -e "$ARM/installed" ] || [ pyproject.toml -nt "$ARM/installed" ]; then
    python3 -m venv "$ARM/tools"
    "$ARM/tools/bin/python" -m pip install --quiet uv
    rm -rf "$ARM/site"
    "$ARM/tools/bin/uv" pip install --quiet --only-binary :all: --target "$ARM/site" \
        --python-version 3.11 --python-platform aarch64-manylinux_2_28 \
        --requirements pyproject.toml torch==$TORCH pytest hypothesis 'setuptools>=77'
    touch "$ARM/installed"
fi

# Debian's arm64 Python names the cross compiler as its own; the emulator starts it on the host.
export PYTHONPATH="$ARM/lib:$ARM/site" PYTHONDONTWRITEBYTECODE=1
rm -rf "$ARM/lib" "$ARM/build"
CPATH=$ROOT/usr/include qemu-aarch64 -L "$ROOT" "$PYTHON" setup.py --quiet build \
    --build-base "$ARM/build" --build-lib "$ARM/lib"

exec qemu-aarch64 -L "$ROOT" "$PYTHON" -m pytest -p no:cacheprovider -q "$@"
