"""`python -m verl_shipper`: the command line without its script on PATH."""

from verl_shipper.cli import main

if __name__ == "__main__":
    main()
