"""What is planned for: data codes, manifests, masks, and streams of samples."""
