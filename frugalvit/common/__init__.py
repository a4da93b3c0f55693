"""What commands and recipes both use: files, images, data sets, models, counting and timing, tables."""
