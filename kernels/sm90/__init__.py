"""Parts of the Hopper kernels `attention_sm90` and `linear_sm90`."""
