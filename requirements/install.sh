#!/bin/sh
# Installs stepquant and its development tools; called by make, in the repository's root.
#
#   requirements/install.sh PYTHON locked     a new environment on x86-64 Linux with Python 3.11: every package as in the
#                                             lock files, by hash, and torch's CPU build
#   requirements/install.sh PYTHON ranges     any other environment: what pyproject.toml allows; packages there are kept
#
# TORCH, where it is set, is what is installed as torch, options of pip included; nothing else is then tried.
set -eu
python=$1 mode=$2
pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }
here=$(dirname "$0")

fits='import platform, sys; print((platform.system(), platform.machine(), *sys.version_info[:2]) == ("Linux", "x86_64", 3, 11))'
if [ "$mode" = locked ] && [ "$("$python" -c "$fits")" != True ]; then
    echo "requirements/ci.lock is for Python 3.11 on x86-64 Linux, this is" \
        "$("$python" -c 'import platform; print("Python", platform.python_version(), platform.machine(), platform.system())'):" \
        "installing what pyproject.toml allows instead, nothing pinned"
    mode=ranges
fi
if [ "$mode" = locked ]; then
    echo "installing the packages of requirements/ci.lock, checked by hash"
    pip install --require-hashes --no-deps --requirement "$here/build.lock"
    pip install --require-hashes --no-deps --no-build-isolation --requirement "$here/ci.lock"
fi
if ! "$python" -c "import torch" 2>/dev/null; then
    if [ -n "${TORCH:-}" ]; then
        echo "installing $TORCH"
        pip install $TORCH # split into words on purpose
    elif [ "$mode" = locked ] && pip install --require-hashes --no-deps --requirement "$here/torch.lock" 2>/dev/null; then
        echo "installed the CPU build of requirements/torch.lock"
    else
        torch=$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' "$here/torch.lock")
        echo "installing $torch as pip finds it, not checked by hash: it found no file of requirements/torch.lock" \
            "(PyPI's build for CUDA takes 3 GB and its own triton; TORCH=... chooses another)"
        pip install "$torch"
    fi
fi
if [ "$mode" = locked ]; then
    pip install --no-deps --no-build-isolation --editable .
    pip check
else
    pip install --editable ".[dev]"
fi
