"""Octo (https://arxiv.org/abs/2405.12213) in JAX: a transformer trunk with a diffusion head."""
