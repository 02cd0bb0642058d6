"""Fused kernels for what autograd has no kernel for; each has a plain form that is its fallback and its oracle."""
