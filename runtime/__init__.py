"""Runs artifacts: on the GPU, on the CPU interpreter, and as a plain torch reference."""
