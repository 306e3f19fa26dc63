#!/usr/bin/env python3
"""Measure msa_ops against published implementations on this machine's GPU.

    PYTHONPATH=src python3 benchmarks/decode.py --json decode.json --markdown decode.md
    PYTHONPATH=src python3 benchmarks/decode.py --device cpu --smoke --against none

``--help`` lists presets, axes and options.
"""

import sys

from msa_ops.bench.main import main

if __name__ == "__main__":
    sys.exit(main())
