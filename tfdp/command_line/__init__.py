"""The command `tfdp`: accounting, plans, and statements of files. See docs/command_line.md."""
