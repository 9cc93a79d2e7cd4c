#!/usr/bin/env bash
# Install megatron_vlm from its source in /opt/trainer: install_package.sh SOURCE
set -euo pipefail
/opt/uv/bin/uv pip install --quiet --no-cache --python /opt/trainer --no-deps "$1"
/opt/trainer/bin/megatron-vlm --version
