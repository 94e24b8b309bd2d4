#!/usr/bin/env bash
# Sets up .venv with torch and deepinfer, and runs things in it. Fast when nothing changed.
#   ./build.sh            set up and show the environment
#   ./build.sh demo       set up, then generate text with the embedded checkpoint
#   ./build.sh test ...   set up with the test tools, then run pytest (arguments are passed on)
#   ./build.sh dev        set up with every tool
# DEEPINFER_ACCELERATOR=cpu|nvidia|ascend  what to set up for; default: nvidia when a GPU is there, else cpu
# PYTHON=...  which interpreter to make .venv with; default: python3.11, python3.12 or newer
set -euo pipefail
cd "$(dirname "$0")"
torch_cpu=2.13.0
die() { echo "build.sh: $*" >&2; exit 1; }
pip() { .venv/bin/python -m pip install -q "$@"; }

action=${1:-setup}
case $action in setup | demo | test | dev) ;; *) die "unknown action '$action'; use demo, test, dev or nothing" ;; esac
shift || true
accelerator=${DEEPINFER_ACCELERATOR:-$(nvidia-smi -L >/dev/null 2>&1 && echo nvidia || echo cpu)}
case $accelerator in cpu | nvidia | ascend) ;; *) die "DEEPINFER_ACCELERATOR is '$accelerator'; use cpu, nvidia or ascend" ;; esac
make_venv() {
    local python='' flags=''
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python=$candidate && break; fi
    done
    [ -n "$python" ] || die "no Python from 3.11 with the venv module found; install one or set PYTHON"
    # An accelerator's torch that the interpreter already has is used, never replaced.
    if [ "$accelerator" != cpu ] && "$python" -c 'import torch' 2>/dev/null; then flags=--system-site-packages; fi
    "$python" -m venv --clear $flags .venv
}
install_torch() {
    .venv/bin/python -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null && return
    case $accelerator in
    ascend) die "torch and torch-npu are not installed in the interpreter that made .venv; install the CANN toolkit with the torch and torch-npu it names, remove .venv, and run again" ;;
    nvidia) pip 'torch>=2.9' ;;
    cpu) # On x86-64 Linux a plain 'torch' brings gigabytes of CUDA; the +cpu builds come from local wheels or from PyTorch's own index.
        if [ "$(uname -sm)" != 'Linux x86_64' ]; then pip 'torch>=2.9' && return; fi
        pip "torch==$torch_cpu+cpu" 2>/dev/null ||
            pip "torch==$torch_cpu+cpu" --extra-index-url https://download.pytorch.org/whl/cpu ||
            die "no CPU build of torch $torch_cpu for this Python was found; install torch>=2.9 into .venv by hand and run again" ;;
    esac
}
setup() { # $1: a dependency group of pyproject.toml, or 'base'
    local key done
    key="$accelerator $PWD $(cat pyproject.toml build.sh | cksum)"
    for done in "$1" dev; do if [ "$(cat ".venv/.deepinfer-$done" 2>/dev/null)" = "$key" ]; then return; fi; done
    echo "build.sh: setting up .venv for $accelerator ($1)" >&2
    .venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv
    pip 'pip>=25.1' # knows dependency groups
    install_torch
    if [ "$1" = base ]; then pip -e .; else pip -e . --group "$1"; fi
    echo "$key" >".venv/.deepinfer-$1"
}

case $action in
setup) setup base && .venv/bin/python -m deepinfer env ;;
dev) setup dev ;;
demo) setup base && exec .venv/bin/python examples/offline_inference.py "$@" ;;
test) setup test && exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@" ;;
esac
