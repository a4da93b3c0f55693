"""Components of training: arguments, data, augmentation, optimizers, checkpoints, cards."""
