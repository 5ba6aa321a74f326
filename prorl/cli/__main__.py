"""`python -m prorl.cli` is `prorl`."""

from prorl.cli import main

if __name__ == "__main__":
    main()
