"""Block-sparse attention in the layers of a diffusers model."""
