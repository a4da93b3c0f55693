"""Choices and default values of options. This module imports no other module."""

# Value of `dataset` for the CIFAR-10 images that ship with the package.
SUBSET = "cifar10-subset"
# Value of `eval_split` for training without evaluation.
NO_EVALUATION = "none"
# Data types of weights, and quantizations of a language model by bitsandbytes.
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("4bit", "8bit")
# Prefix of an open_clip model's name, as in open_clip:MODEL:PRETRAINED.
OPEN_CLIP = "open_clip:"
# Values of `device_map`, by which Accelerate distributes a model over devices.
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
# Class number of ignored pixels in a mask.
IGNORED = 255
