"""`python -m autopar.cli`, which torchrun starts."""

from autopar.cli.main import main

if __name__ == "__main__":
    main()
