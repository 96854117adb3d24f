"""What commands share: reading inputs, writing outputs, tables."""
