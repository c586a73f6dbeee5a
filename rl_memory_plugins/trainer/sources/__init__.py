"""`TensorSource`s for what trainers hold; each gives one whole tensor at a time, under the checkpoint's names."""
