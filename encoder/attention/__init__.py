"""Attention backends behind one function."""
