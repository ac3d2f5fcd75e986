"""`python -m cachefs`: the same as the `cachefs` command."""

from cachefs.cli import main

if __name__ == "__main__":
    main()
