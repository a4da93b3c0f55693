"""Choices and defaults of options, names and numbers alone."""

# The CIFAR-10 images that come with the package, as a data set.
SUBSET = "cifar10-subset"
# What `--eval-split` says for training without evaluation.
NO_EVALUATION = "none"
# Types of weights, and ways in which bitsandbytes can store those of a language model.
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("4bit", "8bit")
# What names of open_clip's models begin with: open_clip:MODEL:PRETRAINED.
OPEN_CLIP = "open_clip:"
# How Accelerate shares a model out among devices.
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
# The label of pixels that do not count.
IGNORED = 255
# What `configuration/` and `modeling/` define, whose files import PyTorch: names that a test compares with theirs.
INITIALIZATIONS = ("impulse", "mimetic", "trunc_normal", "kaiming_uniform")
REFERENCE = "reference"
FOCUSINGS = ("paper", "inherited")
PLACEMENTS = ("grid", "content")
CONTEXT_BROADCASTS = ("cb", "cb_s", "cb_gate", "cb_hybrid")
CONTEXT_BROADCAST_POSITIONS = ("mlp_front", "mlp_mid", "mlp_end", "attention_end")
JOINT_VARIANTS = tuple(
    f"{name}-{size}{stem}" for name in ("joint", "shared") for size in ("small", "base") for stem in ("", "-res")
)
CONVERTED_VARIANTS = ("v1", "bootstrapped", "bootstrapped-clip")
