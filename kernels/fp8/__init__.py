"""Linear layers with e4m3 operands: for GPUs of compute capability 8.9 and later."""
