"""The options of each command, a file each. They are read before the command's own imports."""
