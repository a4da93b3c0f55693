"""Components of the training recipes: arguments, data, augmentation, optimizers, checkpoints, cards."""
