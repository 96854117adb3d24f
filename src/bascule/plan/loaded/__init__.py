"""What ranks loaded: sequences, what their tokens see, and the contexts that they attend to."""
