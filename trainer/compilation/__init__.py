"""Alone touches torch.compile, CUDA graphs, tracing state and the compile cache."""
