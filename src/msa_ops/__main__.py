"""``python -m msa_ops``: the command line without an installed script."""

from .cli.main import main

if __name__ == "__main__":
    main()
