"""Requests of a pipeline of diffusers on blocks of ranks, which they change between steps."""
