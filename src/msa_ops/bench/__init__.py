"""The benchmark: this package and published implementations of the same operation, on one card, in one process.

Imported by the command line and by ``benchmarks/`` only; ``import msa_ops`` does not load it.
"""
