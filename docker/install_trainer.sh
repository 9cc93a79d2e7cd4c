#!/usr/bin/env bash
# Install what the trainer depends on in /opt/trainer: install_trainer.sh LOCK_FILE
# TORCH_BACKEND=cpu takes PyTorch's build for the CPU.
set -euo pipefail
uv() { /opt/uv/bin/uv "$@"; }
install() {
  uv pip install --quiet --no-cache --python /opt/trainer ${TORCH_BACKEND:+--torch-backend "$TORCH_BACKEND"} "$@"
}
uv venv --quiet --python python3 /opt/trainer
if grep -q ^transformer-engine-torch "$1"; then
  # Its extension is compiled against the torch that is installed, with the headers of torch's
  # packages. With its dependencies uv would add the core for CUDA 12, which has the same files.
  install torch setuptools wheel ninja pybind11 --constraint "$1"
  CPATH=$(printf '%s:' /opt/trainer/lib/python3.*/site-packages/nvidia/*/include)
  export CPATH
  install --no-deps --requirement "$1" --no-build-isolation-package transformer-engine-torch
  /opt/trainer/bin/python -c 'import transformer_engine.pytorch'
else
  install --requirement "$1"
fi
