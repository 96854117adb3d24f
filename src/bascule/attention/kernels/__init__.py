"""What computes attention on one device, and says why where it cannot."""
