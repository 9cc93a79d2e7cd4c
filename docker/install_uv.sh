#!/usr/bin/env bash
# Install uv, which makes the environments: install_uv.sh CONSTRAINTS
set -euo pipefail
python3 -m venv /opt/uv
/opt/uv/bin/pip install --quiet --no-cache-dir --constraint "$1" uv
