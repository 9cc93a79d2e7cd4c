"""Encoding of the Tinker client's requests and of the responses: bytes on one side, plain values on
the other. It needs numpy, protobuf and zstandard, and also runs in the client's environment."""
