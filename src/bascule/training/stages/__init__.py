"""What runs before the transformer: frozen encoders of pixels and captions, in balance."""
