"""Hand-written GPU kernels, in Triton, where a profile has shown a gain; imported on a GPU only."""
