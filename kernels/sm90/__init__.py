"""The Hopper kernels, attention and linear, in Gluon."""
