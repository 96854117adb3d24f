"""What a sample is when it is loaded, planned for, and sent to another rank."""
