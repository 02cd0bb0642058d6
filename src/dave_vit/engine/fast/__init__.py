"""Speed: recorded models, fused kernels, compiled passes and CUDA graphs that stand in for the plain forms."""
