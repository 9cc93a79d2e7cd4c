"""How the Tinker client's requests and our answers are written: bytes on one side, plain values on
the other. It needs numpy, protobuf and zstandard, and runs in the client's environment too."""
