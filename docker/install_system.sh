#!/usr/bin/env bash
# Install the system's packages that the environments need, and create the user that runs them.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# torch.compile and Transformer Engine need a compiler.
apt-get install -qq -y --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv
rm -rf /var/lib/apt/lists/*
useradd --create-home --uid 10001 trainer
mkdir -p /runs
chown trainer /runs
