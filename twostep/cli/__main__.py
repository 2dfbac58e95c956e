"""`python -P -m twostep.cli` is `twostep`."""

from twostep.cli import main

if __name__ == "__main__":
    main()
