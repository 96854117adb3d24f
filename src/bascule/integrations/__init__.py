"""Other people's objects: each is imported where it is used, and left as it was."""
