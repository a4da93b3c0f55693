"""`Trainer` with sharpness-aware minimization (SAM; Foret et al., *Sharpness-Aware Minimization for Efficiently
Improving Generalization*, ICLR 2021)."""

import torch

from .trainer import ImageTrainer


class SharpnessAwareTrainer(ImageTrainer):
    """`ImageTrainer` with sharpness-aware minimization (SAM) if `args.sam_rho` is above 0."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None) -> tuple[type, dict]:
        """Return Transformers' optimizer class and its options. If `sam_rho` is set, SAM wraps the optimizer class."""
        optimizer_class, options = ImageTrainer.get_optimizer_cls_and_kwargs(args, model)
        if not args.sam_rho:
            return optimizer_class, options
        try:
            import pytorch_optimizer
        except ImportError:
            raise ValueError("sam_rho needs pytorch_optimizer: pip install 'frugalvit[sam]'.") from None

        class SAM(pytorch_optimizer.SAM):
            """SAM whose `step` only calls `second_step`. `SharpnessAwareTrainer.training_step` calls `first_step`."""

            def step(self, closure=None):
                self.second_step()

        return SAM, {"base_optimizer": optimizer_class, "rho": args.sam_rho, **options}

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Compute the gradient and return the loss. With SAM, `first_step` then perturbs the weights, and the gradient
        is computed again at the perturbed weights."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.args.sam_rho:
            if self.args.max_grad_norm:
                self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
            self.optimizer.optimizer.first_step(zero_grad=True)
            super().training_step(model, inputs, num_items_in_batch)
        return loss
