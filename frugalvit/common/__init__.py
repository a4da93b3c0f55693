"""Tools of all commands: files, images, data sets, models, counting and timing, tables."""
