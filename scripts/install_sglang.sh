#!/usr/bin/env bash
# Installs what the tests against real SGLang servers need into the virtual environment of PYTHON; run it from the
# repository's root.
#   scripts/install_sglang.sh .venv-sglang/bin/python
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?usage: scripts/install_sglang.sh PYTHON (the interpreter of a Python 3.11 virtual environment)}
"$python" -m pip install -q -r requirements/sglang.txt
"$python" -m pip install -q --no-deps sglang==0.5.17
