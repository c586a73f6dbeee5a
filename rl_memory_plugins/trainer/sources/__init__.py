"""`TensorSource`s for what trainers hold: one whole tensor at a time, under the checkpoint's names."""
