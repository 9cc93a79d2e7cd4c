"""Runs in the environment of the public client: weights as files, by way of the service.

exported.py CHECKPOINT OUT
"""

import sys

import tinker
from tinker_cookbook import weights


def main(checkpoint, out):
    client = tinker.ServiceClient().create_training_client_from_state(checkpoint).result()
    path = client.save_weights_external("export").result().path
    weights.download(tinker_path=path, output_dir=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
