"""`python -m tfdp`: the same as the command `tfdp`."""

from tfdp.command_line.main import main

if __name__ == "__main__":
    main()
