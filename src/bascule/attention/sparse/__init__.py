"""Block-sparse attention over a mesh of ranks."""
