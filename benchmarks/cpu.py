#!/usr/bin/env python3
"""Measure the CPU engine against torch's attention on keys that are gathered and widened already.

    PYTHONPATH=src python3 benchmarks/cpu.py [--threads 2] [--forms bf16 fp8 ...] [--json FILE]

The measurement is `msa_ops.bench.cpu`; ``msa-ops bench cpu`` is the same with pictures. The exit status is 1 if a ratio
or a peak is past its bar.
"""

import sys

from msa_ops.bench.cpu import main

if __name__ == "__main__":
    sys.exit(main())
