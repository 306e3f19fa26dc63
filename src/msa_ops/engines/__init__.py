"""Implementations of the op, one per kind of device. They never import each other."""
