"""Tools of commands and recipes alike: files, images, data sets, models, counting and timing, tables."""
