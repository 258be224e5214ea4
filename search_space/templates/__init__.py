"""The templates that ship, one module each."""
