#!/usr/bin/env bash
# Install vLLM in /opt/vllm: install_vllm.sh LOCK_FILE
set -euo pipefail
/opt/uv/bin/uv venv --quiet --python python3 /opt/vllm
/opt/uv/bin/uv pip install --quiet --no-cache --python /opt/vllm --requirement "$1"
