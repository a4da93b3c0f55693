"""The options of each training command, a file each: read before what the command needs is imported."""
