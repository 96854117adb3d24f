"""Training of diffusers' models in balance: samples of any shape change ranks, or are shared."""
