#!/usr/bin/env bash
# Installs what the tests of megatron-trainer need into the virtual environment of PYTHON; run it from the repository's root.
#   scripts/install_megatron.sh .venv-megatron/bin/python
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?usage: scripts/install_megatron.sh PYTHON (the interpreter of a Python 3.11 virtual environment)}
"$python" -m pip install -q torch==2.13.0
"$python" -m pip install -q -r requirements/megatron.txt
"$python" -m pip install -q --no-deps --ignore-requires-python --no-binary megatron-core megatron-core==0.19.2
