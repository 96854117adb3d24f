"""Images and videos from a pipeline of diffusers over local ranks, for a list of prompts."""
