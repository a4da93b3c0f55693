"""The options of each command, a file each: read before what the command needs is imported."""
