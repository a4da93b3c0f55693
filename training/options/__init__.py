"""The options of each recipe, a file each: read before what the recipe needs is imported."""
