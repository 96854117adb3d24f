"""Adapters for other libraries; each library is imported only where it is used."""
