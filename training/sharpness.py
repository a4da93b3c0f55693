"""Sharpness-aware minimization (Foret et al., *Sharpness-Aware Minimization for Efficiently Improving Generalization*,
ICLR 2021) in a `Trainer`."""

import torch

from .trainer import ImageTrainer


class SharpnessAwareTrainer(ImageTrainer):
    """`ImageTrainer` that, with `args.sam_rho` above 0, takes each step by the gradient at the highest loss nearby."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None) -> tuple[type, dict]:
        """As in Transformers, wrapped by pytorch_optimizer's SAM."""
        optimizer_class, options = ImageTrainer.get_optimizer_cls_and_kwargs(args, model)
        if not args.sam_rho:
            return optimizer_class, options
        try:
            import pytorch_optimizer
        except ImportError:
            raise ValueError("sam_rho needs pytorch_optimizer: pip install 'frugalvit[sam]'.") from None

        class SAM(pytorch_optimizer.SAM):
            """SAM whose first step the trainer makes, between both gradients."""

            def step(self, closure=None):
                self.second_step()

        return SAM, {"base_optimizer": optimizer_class, "rho": args.sam_rho, **options}

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Compute the gradient and, with SAM, move along it to compute a second one there. Return the first loss."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.args.sam_rho:
            if self.args.max_grad_norm:
                self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
            self.optimizer.optimizer.first_step(zero_grad=True)
            super().training_step(model, inputs, num_items_in_batch)
        return loss
