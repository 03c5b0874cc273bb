"""Benchmarks of kernels, of the encoder and of engines; `vitgraph bench` runs some of them."""
